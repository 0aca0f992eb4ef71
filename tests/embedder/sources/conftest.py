"""Real trees, tars, tables and an S3 server on this machine, made small."""

import hashlib
import io
import os
import tarfile
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pyarrow as pa
import pytest

from embedder.batch_schema import CARRIED
from embedder.config_toml.run_sections import Columns, SourceConfig
from embedder.sources.listing import list_sources

ListItems = Callable[..., dict[str, dict[str, object]]]


@pytest.fixture
def list_items() -> ListItems:
    """List one source; give its rows by id, in order."""

    def listed(path: str | Path, **settings: object) -> dict[str, dict[str, object]]:
        columns = Columns(**settings.pop("columns", {}))  # type: ignore[arg-type]
        source = SourceConfig(path=str(path), columns=columns, **settings)  # type: ignore[arg-type]
        table = pa.concat_tables([*list_sources([source])] or [pa.table({"item_id": pa.array([], pa.string())})])
        table = table.rename_columns([name.removeprefix(CARRIED) for name in table.schema.names])
        rows = {row["item_id"]: row for row in table.to_pylist()}
        assert len(rows) == table.num_rows, "ids must be unique"
        return rows

    return listed


@pytest.fixture
def make_files(tmp_path: Path) -> Callable[[Mapping[str, bytes | str]], Path]:
    """Write a tree of files; give its root."""

    def written(files: Mapping[str, bytes | str], root: str = "root") -> Path:
        folder = tmp_path / root
        folder.mkdir(exist_ok=True)
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        return folder

    return written


@pytest.fixture
def make_tar(tmp_path: Path) -> Callable[..., Path]:
    """Write a tar of members in the order given; a member may be bytes, a text, or a ready TarInfo."""

    def written(
        members: list[tuple[str, bytes | str | tarfile.TarInfo]],
        name: str = "a.tar",
        tar_format: int = tarfile.PAX_FORMAT,
    ) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, "w", format=tar_format) as tar:
            for member, content in members:
                if isinstance(content, tarfile.TarInfo):
                    tar.addfile(content)
                    continue
                data = content.encode() if isinstance(content, str) else content
                info = tarfile.TarInfo(member)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        return path

    return written


class _Bucket(BaseHTTPRequestHandler):
    """The little of S3 that is needed: ListObjectsV2 in pages of 3, HEAD, GET with ranges and If-Match."""

    objects: ClassVar[dict[str, bytes]] = {}
    log: ClassVar[list[str]] = []
    forbidden: ClassVar[set[str]] = set()
    listed: ClassVar[list[tuple[str, str]]] = []
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        url = urlsplit(self.path)
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        self.log.append(f"{self.command} {key} {self.headers.get('Range', '')}".strip())
        if bucket != "team":
            self._send(404, b"<Error><Code>NoSuchBucket</Code></Error>", {}, with_body)
        elif not key:
            self._send(200, self._page(parse_qs(url.query)), {"Content-Type": "application/xml"}, with_body)
        elif key in self.forbidden:
            self._send(403, b"<Error><Code>AccessDenied</Code></Error>", {}, with_body)
        elif key not in self.objects:
            self._send(404, b"<Error><Code>NoSuchKey</Code></Error>", {}, with_body)
        else:
            self._send_object(self.objects[key], with_body)

    def _send_object(self, data: bytes, with_body: bool) -> None:
        etag = f'"{hashlib.md5(data).hexdigest()}"'
        headers = {"ETag": etag, "Last-Modified": "Wed, 01 Jan 2025 00:00:00 GMT"}
        if self.headers.get("If-Match", etag) != etag:
            self._send(412, b"", headers, with_body)
            return
        if wanted := self.headers.get("Range"):
            start, _, last = wanted.removeprefix("bytes=").partition("-")
            stop = min(int(last) + 1, len(data))
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
            self._send(206, data[int(start) : stop], headers, with_body)
            return
        self._send(200, data, headers, with_body)

    def _page(self, query: dict[str, list[str]]) -> bytes:
        prefix = query.get("prefix", [""])[0]
        after = query.get("continuation-token", [""])[0]
        delimiter = query.get("delimiter", [""])[0]
        keys = [key for key in sorted(self.objects) if key.startswith(prefix)]
        folders = []
        if delimiter:
            inside = [key for key in keys if delimiter in key[len(prefix) :]]
            folders = sorted({prefix + key[len(prefix) :].partition(delimiter)[0] + delimiter for key in inside})
            keys = [key for key in keys if key not in inside]
        keys = [key for key in keys if key > after]
        page, rest = keys[:3], keys[3:]
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2025-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>&quot;{hashlib.md5(self.objects[key]).hexdigest()}&quot;</ETag>"
            f"<Size>{len(self.objects[key])}</Size><StorageClass>STANDARD</StorageClass></Contents>"
            for key in page
        )
        contents += "".join(f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>" for each in folders)
        self.listed.append((prefix, delimiter))
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if rest else ""
        return (
            f"<ListBucketResult><Name>team</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(page)}</KeyCount>"
            f"<MaxKeys>3</MaxKeys><IsTruncated>{str(bool(rest)).lower()}</IsTruncated>{contents}{token}"
            "</ListBucketResult>"
        ).encode()

    def _send(self, status: int, body: bytes, headers: Mapping[str, str], with_body: bool) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Bucket]]:
    """An empty bucket `s3://team` behind a real S3 client."""
    from embedder.sources import object_listing

    handler = type("Bucket", (_Bucket,), {"objects": {}, "log": [], "forbidden": set(), "listed": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    object_listing.bucket_store.cache_clear()
    yield handler
    object_listing.bucket_store.cache_clear()
    server.shutdown()
    server.server_close()
