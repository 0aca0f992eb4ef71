"""Errors of a bucket: transient ones are retried, the rest is one clear line, and no message has a secret."""

import json
import os
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import samples
from bucket_server import KEY, SECRET

from embedder.cli import main
from embedder.config_toml.run_sections import SourceConfig
from embedder.errors import SourceError, StoreError
from embedder.sources.listing import list_sources
from embedder.sources.object_listing import find_object
from embedder.sources.source_errors import FetchError
from embedder.storage import object_stores
from embedder.storage.model_download import resolve_model
from embedder.storage.object_stores import explain, without_credentials
from embedder.store.files import StoreFiles
from embedder.store.store_errors import StoreUnavailableError
from embedder.store.tables.tables import RecordTable
from shards.model_errors import ModelError

CREDENTIALS = f"s3://{KEY}:{SECRET}@team/a"


def answer_xml(code: str, more: str = "") -> bytes:
    return f"<Error><Code>{code}</Code>{more}<AWSAccessKeyId>{KEY}</AWSAccessKeyId></Error>".encode()


@pytest.fixture
def answering(monkeypatch):
    """Make a server that gives the answers one after the other, and the last one for ever; counts requests."""

    @contextmanager
    def running(*answers: tuple[int, bytes], delay_s: float = 0.0):
        requests = []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, body = answers[min(len(requests), len(answers) - 1)]
                requests.append(self.command)
                time.sleep(delay_s)
                self.send_response(status)
                self.send_header("ETag", '"1"')
                self.send_header("Last-Modified", "Wed, 01 Jan 2025 00:00:00 GMT")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: object) -> None:
                """A client that has given up is no news."""

        server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name in [each for each in os.environ if each.startswith("AWS_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        object_stores.bucket_store.cache_clear()
        yield requests
        object_stores.bucket_store.cache_clear()
        server.shutdown()
        server.server_close()

    return running


@pytest.mark.parametrize(
    ("status", "code", "more", "message"),
    [
        (404, "NoSuchBucket", "", r"s3://team/a/store: there is no such bucket; correct the name, or create it first"),
        (403, "AccessDenied", "", r"access is denied \(403 AccessDenied\).*grant them the bucket, or use others"),
        (403, "InvalidAccessKeyId", "", r"access is denied \(403 InvalidAccessKeyId\)"),
        (400, "ExpiredToken", "", r"the server refused the request \(400 ExpiredToken\)"),
        (
            400, "AuthorizationHeaderMalformed", "<Region>eu-west-1</Region>",
            "asked for in us-east-1, and it is in eu-west-1; set AWS_REGION to the bucket's region",
        ),
        (301, "PermanentRedirect", "", r"asked for in us-east-1, and it is elsewhere; set AWS_REGION"),
    ],
)  # fmt: skip
def test_what_will_not_pass_is_one_line_with_the_cure_and_not_tried_again(answering, status, code, more, message):
    attempts = {
        "read": lambda files: files.read("CURRENT.json"),
        "list": lambda files: list(files.list("runs")),
        "write": lambda files: files.write("x", b"1"),
        "create": lambda files: files.create("x", b"1"),
        "table": lambda files: RecordTable(files, "items"),
    }
    with answering((status, answer_xml(code, more))) as requests:
        for name, attempt in attempts.items():
            requests.clear()
            with pytest.raises(StoreError, match=message) as caught:
                attempt(StoreFiles("s3://team/a/store"))
            assert "\n" not in str(caught.value)
            assert SECRET not in str(caught.value)
            assert KEY not in str(caught.value)
            assert len(requests) <= 2, f"{name} asked {len(requests)} times"


@pytest.mark.parametrize("trouble", [(503, answer_xml("SlowDown")), (500, answer_xml("InternalError")), (429, b"")])
def test_throttling_and_server_errors_pass_when_asked_again(answering, trouble):
    with answering(trouble, trouble, (200, b"the content")) as requests:
        assert StoreFiles("s3://team/store").read("CURRENT.json") == b"the content"
    assert len(requests) == 3


@pytest.mark.medium
def test_trouble_that_does_not_pass_ends_after_a_bounded_number_of_tries_as_transient(answering, monkeypatch):
    monkeypatch.setattr(object_stores, "MAX_RETRIES", 2)
    files = StoreFiles("s3://team/store")
    with answering((503, answer_xml("SlowDown"))) as requests:
        with pytest.raises(StoreUnavailableError, match="even after many retries; try again when it answers$"):
            files.read("CURRENT.json")
        assert len(requests) == 3
        with pytest.raises(FetchError) as caught:
            find_object("s3://team/a.jpg")
        assert (caught.value.error_type, caught.value.transient) == ("NetworkError", True)
        with pytest.raises(StoreUnavailableError):
            RecordTable(files, "items")


def test_a_server_that_hangs_is_given_up_after_the_time_out(answering, monkeypatch):
    monkeypatch.setattr(object_stores, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(object_stores, "MAX_RETRIES", 1)
    given_up = pytest.raises(StoreUnavailableError, match=r"store s3://team/store/CURRENT\.json")
    with answering((200, b"late"), delay_s=5), given_up:
        StoreFiles("s3://team/store").read("CURRENT.json")


def test_a_server_that_is_not_there_is_passing_trouble(answering, monkeypatch):
    monkeypatch.setattr(object_stores, "MAX_RETRIES", 1)
    with answering((200, b"")):
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        with pytest.raises(StoreUnavailableError, match="error sending request"):
            StoreFiles("s3://team/store").read("CURRENT.json")


def test_a_command_whose_store_is_away_ends_with_one_line_and_exit_1(
    answering, monkeypatch, tmp_path, tiny_model, capsys
):
    monkeypatch.setattr(object_stores, "MAX_RETRIES", 0)
    samples.folder(tmp_path / "in", num_images=1)
    with answering((503, answer_xml("SlowDown"))):
        arguments = ["embed", str(tmp_path / "in"), "--model", str(tiny_model), "--store", "s3://team/store"]
        monkeypatch.setattr("sys.argv", ["embedder", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("embedder: store s3://team/store/CURRENT.json")
    assert last.endswith("try again when it answers"), "no run has begun, so there is nothing to continue"


def test_no_credentials_at_all_is_one_line(monkeypatch, tmp_path):
    for name in [each for each in os.environ if each.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setattr(object_stores, "MAX_RETRIES", 0)
    object_stores.bucket_store.cache_clear()
    with pytest.raises(StoreError, match="found no credentials; set AWS_ACCESS_KEY_ID"):
        StoreFiles("s3://team/store").read("CURRENT.json")
    object_stores.bucket_store.cache_clear()


def test_keys_of_a_profile_are_used_where_no_variable_gives_any(monkeypatch, tmp_path, bucket, s3_server):
    for name in [each for each in os.environ if each.startswith("AWS_")]:
        monkeypatch.delenv(name)
    (tmp_path / "credentials").write_text(f"[nightly]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n")
    (tmp_path / "config").write_text(f"[profile nightly]\nregion = eu-west-1\nendpoint_url = {s3_server}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "nightly")
    object_stores.bucket_store.cache_clear()
    files = StoreFiles(f"{bucket}/store")
    files.write("a", b"1")
    assert files.read("a") == b"1"
    assert RecordTable(files, "items").version < 0, "deltalake finds the same profile"
    config = str(object_stores.bucket_store(f"{bucket}/store").config)
    assert "eu-west-1" in config
    assert SECRET not in repr(vars(files))
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    assert "region" not in object_stores.profile_settings()[0]


@pytest.mark.parametrize("uri", [CREDENTIALS, f"s3://{KEY}:{SECRET.replace('/', '')}@team/a", f"s3://{KEY}@team/a"])
def test_credentials_in_a_uri_are_refused_everywhere_without_being_told_again(uri):
    attempts = {
        StoreError: lambda: StoreFiles(uri),
        SourceError: lambda: list(list_sources([SourceConfig(path=uri)])),
        ModelError: lambda: resolve_model(uri),
        FetchError: lambda: find_object(uri),
    }
    for kind, attempt in attempts.items():
        with pytest.raises(kind, match="credentials never stand in a URI; set AWS_ACCESS_KEY_ID") as caught:
            attempt()
        for secret in (KEY, SECRET, SECRET.replace("/", ""), SECRET.partition("/")[0]):
            assert secret not in str(caught.value)
            assert secret not in repr(caught.value)


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        (CREDENTIALS, "s3://***@team/a"),
        ("s3://team/a@b:c.jpg", "s3://team/a@b:c.jpg"),
        ("https://user:pass@host/a.jpg?X-Amz-Signature=secret", "https://***@host/a.jpg"),
        ("/a/b@c?d", "/a/b@c?d"),
    ],
)
def test_uris_are_shown_without_what_opens_them(uri, shown):
    assert without_credentials(uri) == shown


def test_a_secret_of_the_environment_that_a_client_quotes_is_struck_out(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    error = explain(OSError(f"Generic S3 error: signed with {SECRET} at http://me:word@proxy:1/x"), "s3://team/a")
    assert error.transient
    assert error.message == "s3://team/a: Generic S3 error: signed with *** at http://***@proxy:1/x"


@pytest.mark.medium
def test_no_secret_stands_in_any_file_of_a_store_or_in_what_the_command_says(
    bucket, tiny_model, tmp_path, run_embedder, capfd
):
    samples.folder(tmp_path / "in", num_images=4)
    photos = [
        str(tmp_path / "in" / "pictures" / "0000.png"),
        CREDENTIALS,
        f"https://{KEY}:{SECRET}@host/x?sig={SECRET}",
    ]
    pq.write_table(pa.table({"id": ["a", "b", "c"], "photo": photos}), tmp_path / "t.parquet")
    (tmp_path / "run.toml").write_text(
        f'model = "{tiny_model}"\nstore = "{bucket}/store"\nengine = "local"\nmax_reject_fraction = 1.0\n'
        f'[[source]]\npath = "{tmp_path}/t.parquet"\nkind = "table"\n'
        'columns = { id = "id", image = "photo" }\n'
    )
    config, store = ("--config", tmp_path / "run.toml"), ("--store", f"{bucket}/store")
    said = []
    for code, *arguments in (
        (0, "embed", *config),
        (0, "index", "build", *store),
        (0, "index", "status", *store),
        (0, "search", "a red car", *store),
        (0, "rejects", *store, "--json"),
        (2, "search", "a red car", "--store", CREDENTIALS),
        (2, "embed", CREDENTIALS, "--model", tiny_model, *store),
        (2, "embed", tmp_path / "in", "--model", CREDENTIALS, *store),
        (2, "rejects", "--store", "s3://nobody/store"),
    ):
        found, result, stderr = run_embedder(*arguments)
        assert found == code, (arguments, stderr)
        assert "Traceback" not in stderr
        said.append(stderr + json.dumps(result) + "".join(capfd.readouterr()))
    files = StoreFiles(f"{bucket}/store")
    everything = {info.path: files.read(info.path) for info in files.list("")}
    assert len(everything) > 10
    assert set(RecordTable(files, "items").read(["state"])["state"].to_pylist()) == {"embedded", "rejected"}
    for name in ("items", "embeddings"):  # part files are compressed; their values are looked at, too
        everything[name] = repr(RecordTable(files, name).read().to_pylist()).encode()
    for secret in (SECRET, KEY, SECRET.partition("/")[2]):
        assert [path for path, content in everything.items() if secret.encode() in content] == []
        assert [text for text in said if secret in text] == []
