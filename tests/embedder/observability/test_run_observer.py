"""What operators get: a log, one line a run, metrics, and a call when it fails; and that no secret is in any of it."""

import json
import os
import signal
import sys
import threading
import time
from contextlib import nullcontext
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import samples
import store_samples
from prometheus_client.parser import text_string_to_metric_families

from embedder import installation
from embedder.compat.operator_stats import OperatorState
from embedder.config import load_config
from embedder.config_toml.run_sections import OnFailure
from embedder.errors import ConfigError, RunFailedError, StoreError
from embedder.executors import datasink
from embedder.executors.bottleneck import OperatorView
from embedder.executors.interrupts import SignalInterrupt
from embedder.executors.progress import show_operators
from embedder.ingest.embed import embed
from embedder.observability import run_observer
from embedder.observability.metrics import metrics_text, write_metrics
from embedder.observability.notify import call_webhook, run_command
from embedder.observability.run_observer import observe_run
from embedder.redaction import mask
from embedder.store.files import StoreFiles
from embedder.store.journal.part_writer import write_part
from embedder.store.journal.runs import Run, all_runs
from embedder.store.store_errors import StoreUnavailableError, StoreUnwritableError

SUMMARY = {"kind": "refresh", "store": "s", "message": "the disk is gone", "exit_code": 1}


def run_of(config):
    files = StoreFiles(config.store)
    return Run(files, all_runs(files)[-1], "0001-test")


def fail(config, error):
    """A run that ends with an error."""
    with pytest.raises(type(error)), observe_run(config.observing, "embed"):
        raise error


def broken(source):
    """A source with a file that nobody can read: too many rejects."""
    (source / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    return source


def lines_of(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def gauges(text):
    """All samples of a metrics file by name and the labels that are not the store's."""
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.type == "gauge" and family.documentation
        for sample in family.samples:
            own = tuple(value for name, value in sample.labels.items() if name not in ("store", "kind"))
            found[sample.name, *own] = sample.value
    return found


def test_a_run_leaves_a_log_a_line_and_metrics(make_run, tmp_path):
    config = make_run(samples.folder(tmp_path / "in"), metrics_file=str(tmp_path / "metrics" / "embedder.prom"))
    embed(config)
    run = run_of(config)
    log = run.files.read(f"runs/{run.run_id}/log.txt").decode()
    assert "6 new, 0 unchanged" in log and "publishing" in log and log.rstrip().endswith("s)") and "exit 0" in log
    assert all(line[:4] == "2" + line[1:4] and line[19] == "Z" for line in log.splitlines())
    (line,) = lines_of(Path(config.store) / "runs.jsonl")
    assert (line["run_id"], line["exit_code"], line["published"]) == (run.run_id, 0, True)
    assert (line["num_new"], line["num_items"], line["num_rejected"]) == (6, 6, 0)
    assert line["steps"]["decode"]["num_rows"] == 6 and line["steps"]["write"]["bytes_out"] > 0
    assert 0 <= line["published_age_s"] < 60
    found = gauges((tmp_path / "metrics" / "embedder.prom").read_text())
    assert found["embedder_run_exit_code",] == 0 and found["embedder_run_published",] == 1
    assert found["embedder_run_count", "items"] == 6 and found["embedder_run_count", "rejected"] == 0
    assert found["embedder_run_step_seconds", "stage 0"] > 0
    assert found["embedder_published_timestamp_seconds",] == pytest.approx(time.time(), abs=60)
    assert [each.name for each in (tmp_path / "metrics").iterdir()] == ["embedder.prom"], "nothing unfinished is left"


def test_each_run_adds_one_line_and_the_resumed_log_goes_on(make_run, tmp_path):
    config = make_run(samples.folder(tmp_path / "in"), log_file=str(tmp_path / "logs" / "embedder.log"))
    embed(config)
    embed(config)
    assert [line["num_new"] for line in lines_of(Path(config.store) / "runs.jsonl")] == [6, 0]
    assert (tmp_path / "logs" / "embedder.log").read_text().count("exit 0") == 2
    assert not list(Path(config.store).glob("runs/*/log.txt")), "the log stands in one place"


@pytest.mark.parametrize(
    ("error", "exit_code"), [(RunFailedError("the guard"), 1), (ConfigError("the key"), 2), (ValueError("the bug"), 1)]
)
def test_a_failure_is_recorded_with_its_exit_code_and_goes_on_to_the_caller(make_run, tmp_path, error, exit_code):
    files = {"metrics_file": str(tmp_path / "m.prom"), "runs_file": str(tmp_path / "runs.jsonl")}
    config = make_run(samples.folder(tmp_path / "in"), **files)
    Path(config.store).mkdir()
    fail(config, error)
    assert not list(Path(config.store).iterdir())
    (line,) = lines_of(config.runs_file)
    assert (line["exit_code"], line["message"]) == (exit_code, str(error))
    assert gauges((tmp_path / "m.prom").read_text())["embedder_run_exit_code",] == exit_code


def test_a_failure_before_there_is_a_store_is_told_all_the_same(make_run, tmp_path):
    (tmp_path / "empty").mkdir()
    runs_file = tmp_path / "records" / "runs.jsonl"
    config = make_run(tmp_path / "empty", runs_file=str(runs_file), metrics_file=str(tmp_path / "m.prom"))
    with pytest.raises(Exception, match="nothing is in it"):
        embed(config)
    assert lines_of(runs_file)[0]["exit_code"] == 2
    assert "embedder_published_age_seconds" not in (tmp_path / "m.prom").read_text()
    assert not Path(config.store).exists()


def test_a_clock_that_is_set_back_changes_no_duration(tmp_path, monkeypatch):
    config = load_config(overrides={"runs_file": str(tmp_path / "runs.jsonl"), "log_file": str(tmp_path / "log.txt")})
    with observe_run(config.observing, "embed") as observer:
        earlier_s = observer.started_s - 3600
        monkeypatch.setattr(time, "time", lambda: earlier_s)
        monkeypatch.setattr(run_observer, "utc_now", lambda: datetime.fromtimestamp(earlier_s, UTC))
        assert 0 <= observer.elapsed_s < 60
    (line,) = lines_of(config.runs_file)
    assert 0 <= line["wall_s"] < 60
    assert line["ended_at"] < line["started_at"], "as the clock says"
    assert "(-" not in (tmp_path / "log.txt").read_text()


def test_a_tracker_whose_package_is_missing_is_told_as_any_other_mistake(tmp_path, monkeypatch):
    monkeypatch.setattr(installation, "missing", lambda extra: ("mlflow",))
    keys = {"runs_file": str(tmp_path / "runs.jsonl"), "on_failure": {"command": ["touch", str(tmp_path / "called")]}}
    config = load_config(overrides=keys | {"tracker": {"kind": "mlflow", "uri": "http://127.0.0.1:9"}})
    with pytest.raises(installation.InstallationError), observe_run(config.observing, "refresh"):
        pass
    assert [line["exit_code"] for line in lines_of(tmp_path / "runs.jsonl")] == [2]
    assert (tmp_path / "called").exists()


def test_progress_is_logged_now_and_then(make_run, tmp_path, monkeypatch):
    monkeypatch.setattr(run_observer, "PROGRESS_S", 0.5)
    config = make_run(tmp_path, log_file=str(tmp_path / "log"))
    with observe_run(config.observing, "embed") as observer, observer.progress(1000) as on_progress:
        on_progress(100)
        time.sleep(0.6)
        on_progress(200)
        on_progress(300)
    logged = [line for line in (tmp_path / "log").read_text().splitlines() if "of 1,000 items" in line]
    assert len(logged) == 1 and "200 of 1,000 items" in logged[0]


@pytest.mark.medium
def test_operators_go_to_a_display_that_shows_them_and_to_the_log_now_and_then(make_run, tmp_path, monkeypatch):
    monkeypatch.setattr(run_observer, "PROGRESS_S", 0.5)
    views = []

    class Display:
        def __call__(self, num_done):
            """Take only operators."""

        def show_operators(self, view):
            views.append(view)

    view = OperatorView((OperatorState("decode", queued_blocks=7),), "decode")
    for name, display in {"with": Display(), "without": lambda num_done: None}.items():
        config = make_run(tmp_path, log_file=str(tmp_path / name))
        with (
            observe_run(config.observing, "embed", lambda num_items, shown=display: nullcontext(shown)) as observer,
            observer.progress(1000) as on_progress,
        ):
            show_operators(on_progress, view)
            time.sleep(0.6)
            show_operators(on_progress, view)
            show_operators(on_progress, view)
        logged = [line for line in (tmp_path / name).read_text().splitlines() if "bottleneck" in line]
        assert len(logged) == 1 and "decode: queue 7, tasks 0" in logged[0] and "bottleneck: decode" in logged[0]
    assert views == [view] * 3


def test_the_log_is_read_once_while_the_run_goes_on_and_again_after_its_end(make_run, tmp_path, monkeypatch):
    run, _ = store_samples.begin(StoreFiles(tmp_path / "store"))
    path = f"runs/{run.run_id}/log.txt"
    run.files.write(path, b"an earlier session\n")
    read, reads = run.files.read, []
    monkeypatch.setattr(run.files, "read", lambda path: reads.append(path) or read(path))
    with observe_run(make_run(tmp_path).observing, "embed") as observer:
        observer.on_run(run)
        observer.log.add("item-7 is odd")
        observer.log.add("the lock is free")
        assert reads.count(path) == 1
        run.files.write(path, read(path).replace(b"item-7", b"(purged)"))  # by another command
    text = read(path).decode()
    assert text.startswith("an earlier session\n") and "the lock is free" in text and "exit 0" in text
    assert "(purged) is odd" in text and "item-7" not in text


def test_what_cannot_be_written_is_said_and_fails_nothing(make_run, tmp_path, said):
    nowhere = {"log_file": "/dev/null/log", "metrics_file": "/dev/null/m.prom", "runs_file": "/dev/null/runs"}
    embed(make_run(samples.folder(tmp_path / "in"), **nowhere))
    for what in ("metrics_file /dev/null/m.prom can't be written", "the line of this run can't", "the log can't be"):
        assert any(what in line for line in said)


def test_of_a_line_for_which_the_disk_has_no_room_no_part_is_left(tmp_path, monkeypatch, said):
    config = load_config(overrides={"runs_file": str(tmp_path / "runs.jsonl")})
    fail(config, RunFailedError("first"))
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda handle, line, write=os.write: write(handle, line[:100]))
        fail(config, RunFailedError("second"))
    fail(config, RunFailedError("third"))
    assert [line["message"] for line in lines_of(tmp_path / "runs.jsonl")] == ["first", "third"]
    assert any("the line of this run can't be written (No space left on device)" in line for line in said)


def test_the_metrics_of_any_store_name_are_well_formed():
    summary = {
        "kind": "refresh",
        "store": 'a "quoted" \\ store\nwith a line break é',
        "exit_code": 1,
        "published": False,
        "ended_at": "2026-01-01T00:00:00+00:00",
        "published_at": None,
        "published_age_s": None,
        "wall_s": 1.5,
        "num_items": 3,
        "steps": {"stage 0": {"wall_s": 1e-9, "cpu_s": 2.0, "bytes_out": 3}},
        "guards": [{"name": "vectors", "passed": False}],
    }
    families = {family.name: family for family in text_string_to_metric_families(metrics_text(summary))}
    assert families["embedder_run_exit_code"].samples[0].labels["store"] == summary["store"]
    assert families["embedder_run_end_timestamp_seconds"].samples[0].value == 1767225600
    assert families["embedder_run_step_seconds"].samples[0].value == 1e-9
    assert families["embedder_run_guard_passed"].samples[0].value == 0
    assert "embedder_published_age_seconds" not in families


def test_a_scrape_never_sees_half_a_file(tmp_path):
    path = tmp_path / "m.prom"
    summary = {"kind": "k", "store": "s", "exit_code": 0, "published": True, "ended_at": None, "published_at": None}
    summary |= {"published_age_s": None, "wall_s": 0, "guards": [], "steps": {}}
    summary |= {f"num_{number}": number for number in range(300)}
    write_metrics(path, summary)
    whole, done = path.read_text(), threading.Event()
    writer = threading.Thread(target=lambda: [write_metrics(path, summary) for _ in range(60)] and done.set())
    writer.start()
    while not done.is_set():
        assert path.read_text() == whole
    writer.join()


def test_a_write_task_counts_into_rays_metrics(tmp_path, monkeypatch):
    from ray.util.metrics import Counter

    added = []
    monkeypatch.setattr(
        Counter, "inc", lambda self, value=1.0, tags=None: added.append((self.info["name"], value, tags))
    )
    run, stamp = store_samples.begin(StoreFiles(tmp_path / "store"))
    rows = store_samples.table(store_samples.row("a"), store_samples.reject("b"))
    entry = write_part(run.files, stamp, 0, rows)
    num_bytes = sum(part.size_bytes for part in entry.parts)
    datasink.count_part(entry)
    of_write = {"step": "write"}
    (seconds,) = (value for name, value, tags in added if (name, tags) == ("embedder_step_seconds", of_write))
    assert 0 < seconds < 60
    assert added == [
        ("embedder_items", 2, None),
        ("embedder_rejects", 1, None),
        ("embedder_vectors", 1, None),
        ("embedder_part_bytes", num_bytes, None),
        ("embedder_step_seconds", seconds, of_write),
        ("embedder_step_rows", 2, of_write),
        ("embedder_step_bytes", num_bytes, of_write),
    ]


def script(tmp_path, text):
    path = tmp_path / "command.py"
    path.write_text(text)
    return (sys.executable, str(path))


def test_the_command_gets_the_record(tmp_path):
    out = tmp_path / "out.json"
    text = f"import os, sys; open({str(out)!r}, 'w').write(sys.stdin.read() + os.environ['EMBEDDER_EXIT_CODE'])"
    assert run_command(script(tmp_path, text), SUMMARY, 20) is None
    record, code = out.read_text().splitlines()
    assert json.loads(record) == SUMMARY and code == "1"


@pytest.mark.medium
def test_a_command_that_hangs_is_ended_with_its_children(tmp_path):
    out = tmp_path / "late"
    child = f"import time; time.sleep(2); open({str(out)!r}, 'w')"
    text = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert "took longer than timeout_s = 1 and was ended" in run_command(script(tmp_path, text), SUMMARY, 1)
    time.sleep(1.5)
    assert not out.exists()


def test_a_command_ends_when_its_own_process_does_whatever_it_leaves_running():
    assert run_command(("sh", "-c", "sleep 9 & exit 0"), SUMMARY, 5) is None


def test_a_command_gets_a_message_of_any_length():
    long = SUMMARY | {"message": "é" * 200_000}
    problem = run_command(("sh", "-c", 'wc -c; echo "${#EMBEDDER_MESSAGE}"; exit 1'), long, 20)
    num_bytes, num_characters = map(int, problem.rpartition(": ")[2].split())
    assert num_bytes > 200_000 and num_characters in (30_000, 60_000), "a shell may count bytes"


def test_what_goes_wrong_with_a_command_is_said(tmp_path):
    assert "can't be started (No such file" in run_command(("/no/such/command",), SUMMARY, 5)
    problem = run_command(script(tmp_path, "import sys; print('no mail server'); sys.exit(3)"), SUMMARY, 20)
    assert problem.endswith("ended with exit code 3: no mail server")


@pytest.fixture
def server():
    """A webhook of this machine: notes what it gets, and answers as the test says."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.server.got.append((self.path, json.loads(body)))
            if self.server.status is None:
                self.wfile.write(b"HTTP/1.1 200")
                for _ in range(100):  # a byte now and then: no single read ever times out
                    time.sleep(0.1)
                    self.wfile.write(b" ")
                    self.wfile.flush()
                return
            self.send_response(self.server.status)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *_):
            """Print nothing."""

        do_GET = do_POST

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.handle_error = lambda *_: None
    httpd.got, httpd.status = [], 200
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield httpd
    httpd.shutdown()
    httpd.server_close()


def address(server):
    return f"http://127.0.0.1:{server.server_port}/hook/T0PS3CRET"


def test_the_webhook_gets_the_record_and_a_text(make_run, tmp_path, server):
    source = broken(samples.folder(tmp_path / "in"))
    config = make_run(source, min_rejects=1, on_failure={"webhook": address(server), "timeout_s": 10})
    with pytest.raises(RunFailedError):
        embed(config)
    ((path, record),) = server.got
    assert path == "/hook/T0PS3CRET"
    assert record["num_items"] == 7 and record["exit_code"] == 1
    assert record["text"].startswith(f"embedder embed of {config.store}: guard rejects: 1 of 7 items")
    assert "T0PS3CRET" not in Path(config.store, "runs.jsonl").read_text()


def test_only_a_run_that_has_begun_is_said_to_go_on(make_run, tmp_path):
    config = make_run(samples.folder(tmp_path / "in", num_images=2, num_clips=0))
    embed(config)
    away = "store s3://team/store/CURRENT.json: it did not answer"
    for error in (StoreUnavailableError(away), StoreUnwritableError(away), SignalInterrupt(signal.SIGINT)):
        before = str(error)
        with pytest.raises(type(error)) as caught, observe_run(config.observing, "embed") as observer:
            observer.on_run(run_of(config))
            raise error
        assert str(caught.value) == f"{before}; what is finished is kept, and the same command continues"
        assert lines_of(Path(config.store, "runs.jsonl"))[-1]["message"] == str(caught.value)
    for error, said in {
        StoreUnavailableError(away): away,
        SignalInterrupt(signal.SIGTERM): "stopped by SIGTERM before anything was embedded",
        StoreError("no such run"): "no such run",
    }.items():
        fail(config, error)
        assert str(error) == said


def test_nobody_is_called_when_all_is_well(make_run, tmp_path, server):
    embed(make_run(samples.folder(tmp_path / "in"), on_failure={"webhook": address(server)}))
    assert server.got == []


@pytest.mark.parametrize(("status", "problem"), [(500, "answered 500"), (302, "answered 302")])
def test_an_answer_that_is_no_success_is_said_and_no_redirect_is_followed(server, status, problem):
    server.status = status
    said = call_webhook(address(server), SUMMARY, 10)
    assert problem in said and "T0PS3CRET" not in said
    assert len(server.got) == 1


@pytest.mark.medium
def test_a_webhook_that_drips_is_given_up(server):
    server.status = None
    assert call_webhook(address(server), SUMMARY, 1) == "no answer within timeout_s = 1"


def test_a_webhook_that_is_not_there_is_said_without_its_address():
    said = call_webhook("http://127.0.0.1:9/T0PS3CRET", SUMMARY, 5)
    assert "can't be reached (connection refused)" in said and "T0PS3CRET" not in said


def test_the_configuration_names_both_and_refuses_what_is_no_address(tmp_path):
    (tmp_path / "c.toml").write_text('[on_failure]\ncommand = ["mail", "ops"]\nwebhook = "https://h"\n')
    assert load_config(tmp_path / "c.toml").on_failure == OnFailure(command=("mail", "ops"), webhook="https://h")
    with pytest.raises(ConfigError, match=r'on_failure\.webhook = "file:///\*\*\*": must be an address'):
        load_config(overrides={"on_failure": {"webhook": "file:///etc/passwd"}})


SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCY"


@pytest.mark.parametrize(
    "text",
    [
        f"https://user:{SECRET}@host/path is gone",
        f"s3://AKIA:{SECRET}@bucket/a: not found",
        f"https://host/a.jpg?X-Amz-Signature={SECRET}&x=1",
        f"https://host/a.jpg?width=3&sig={SECRET}",
        f"https://host/a?access_token={SECRET}",
        f"the server said: bad secret {SECRET}",
        f"aws_secret_access_key={SECRET} in the file".replace("aws", " aws"),
    ],
)
def test_secrets_are_masked_wherever_they_stand(text, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    masked = mask(text)
    assert SECRET not in masked and "***" in masked


@pytest.mark.parametrize(
    "text", ["/data/key=value/a.jpg", "a@b.c wrote", "https://host/a?width=3&height=4", "1 of 5 items: token ids", ""]
)
def test_what_is_no_secret_stays(text, monkeypatch):
    for name, value in {"RAY_AUTH_TOKEN_PATH": "/data", "API_KEY": "of", "HOME": "/data"}.items():
        monkeypatch.setenv(name, value)
    assert mask(text) == text


def test_secrets_of_the_environment_reach_no_file_of_a_run(make_run, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    config = make_run(samples.folder(tmp_path / "in"), metrics_file=str(tmp_path / "m.prom"))
    embed(config)
    fail(config, RunFailedError(f"the server refused {SECRET}"))
    paths = [path for path in [*Path(config.store).rglob("*"), tmp_path / "m.prom"] if path.is_file()]
    assert len(paths) > 5
    assert not [path for path in paths if SECRET.encode() in path.read_bytes()]
