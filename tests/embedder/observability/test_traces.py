"""Traces of a run: which spans there are, how they lie within each other, and what they cost where nobody listens."""

import gzip
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import samples

from embedder import installation
from embedder.errors import RunFailedError
from embedder.ingest.embed import embed, refresh
from embedder.installation import InstallationError
from embedder.observability.traces import RunTraces, export_traces, is_sampled, trace_run
from embedder.store.journal.journal import JournalEntry

trace = pytest.importorskip("opentelemetry.sdk.trace", reason="traces are of the extra otel")
in_memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")

NOW_S = 1_790_000_000.0


@pytest.fixture(autouse=True)
def otel_is_there(monkeypatch):
    """The exporter over HTTP may be missing where the SDK is there; none of these tests sends anything by it."""
    monkeypatch.setitem(installation.EXTRAS, "otel", ("opentelemetry.sdk",))
    installation.missing.cache_clear()
    yield
    installation.missing.cache_clear()


def entry(*steps, number=0):
    calls = [
        {
            "step": step,
            "node": "n",
            "pid": 1,
            "started_s": NOW_S + 10 * index,
            "wall_s": 2.5,
            "cpu_s": 1.0,
            "num_rows": 4,
        }
        for index, step in enumerate(steps)
    ]
    return JournalEntry(name=f"s-{number}", parts=(), num_items=4, num_rejects=0, trace=calls)


def test_a_run_in_a_file_has_its_phases_and_batches(make_run, tmp_path):
    path = tmp_path / "traces" / "spans.jsonl"
    config = make_run(samples.folder(tmp_path / "in"), traces=str(path), rows_per_part=2)
    embed(config)
    spans = [json.loads(line) for line in path.read_text().splitlines()]
    (root,) = [span for span in spans if span["parent_id"] is None]
    assert root["name"] == "embed" and root["resource"]["attributes"]["service.name"] == "embedder"
    attributes = root["attributes"]
    assert attributes["embedder.store"] == config.store and attributes["embedder.run_id"]
    inner = {span["name"]: span for span in spans if span["parent_id"] == root["context"]["span_id"]}
    assert set(inner) == {"listing", "comparison", "embedding", "publication"}
    inside = [span for span in spans if span["parent_id"] == inner["embedding"]["context"]["span_id"]]
    names = {span["name"] for span in inside}
    assert {"decode", "stage 0", "stage 1", "stage 2", "write"} <= names
    assert sum(span["attributes"]["embedder.rows"] for span in inside if span["name"] == "decode") == 6
    assert len({span["context"]["trace_id"] for span in spans}) == 1
    embedding = inner["embedding"]
    assert all(
        embedding["start_time"] <= span["start_time"] <= span["end_time"] <= embedding["end_time"] for span in inside
    )

    refresh(config)
    again = [json.loads(line)["name"] for line in path.read_text().splitlines()][len(spans) :]
    assert sorted(again) == ["comparison", "listing", "refresh"], "a run without a change embeds and publishes nothing"


def test_batches_keep_their_own_times_and_an_error_its_type_alone():
    exporter = in_memory.InMemorySpanExporter()
    with (
        pytest.raises(RunFailedError),
        export_traces(exporter, "refresh", "s3://key:secret@bucket/x") as traces,
        traces.span("embedding"),
    ):
        traces.on_entry(entry("decode", "stage 0"))
        raise RunFailedError("of /home/ann/private.jpg")
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert spans["stage 0"].start_time == int((NOW_S + 10) * 1e9)
    assert spans["stage 0"].end_time - spans["stage 0"].start_time == pytest.approx(2.5e9, abs=1000)
    for name in ("embedding", "refresh"):
        assert spans[name].status.status_code.name == "ERROR" and spans[name].status.description == "RunFailedError"
    text = " ".join(span.to_json() for span in spans.values())
    assert "private.jpg" not in text and "secret" not in text


def test_of_many_batches_a_sample_has_spans():
    exporter = in_memory.InMemorySpanExporter()
    with export_traces(exporter, "embed", None) as traces:
        for number in range(1500):
            traces.on_entry(entry("decode", number=number))
            assert len(exporter.get_finished_spans()) < 300
    numbers = [span.attributes["embedder.batch"] for span in exporter.get_finished_spans() if span.name == "decode"]
    assert numbers == [number for number in range(1500) if is_sampled(number)] and len(numbers) == 100 + 90 + 5


def test_without_the_key_nothing_of_opentelemetry_is_used():
    with trace_run(None, "embed", "s") as traces:
        assert type(traces) is RunTraces
        with traces.span("listing"):
            traces.on_entry(entry("decode"))
            traces.describe(run_id="a")


def test_a_file_that_cannot_be_written_is_told_and_fails_nothing(make_run, tmp_path, said):
    embed(make_run(samples.folder(tmp_path / "in"), traces="/dev/null/spans"))
    assert any("traces /dev/null/spans: can't be written" in line for line in said)


def test_a_missing_extra_is_named_before_anything_begins(make_run, tmp_path, monkeypatch):
    monkeypatch.setitem(installation.EXTRAS, "otel", ("opentelemetry.nothing_of_this_name",))
    installation.missing.cache_clear()
    config = make_run(samples.folder(tmp_path / "in"), traces=str(tmp_path / "spans"))
    with pytest.raises(InstallationError, match=r"traces: needs .* pip install 'embedder\[otel\]'"):
        embed(config)
    assert not (tmp_path / "store").exists()


@pytest.mark.medium
def test_a_collector_that_is_not_there_costs_its_spans_alone(make_run, tmp_path, said, capfd):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    report = embed(make_run(samples.folder(tmp_path / "in"), traces=f"http://127.0.0.1:{port}"))
    assert report.published
    (line,) = [line for line in said if line.startswith("traces ")]
    assert f"traces http://127.0.0.1:{port}: spans were not sent" in line and "\n" not in line
    assert "Transient error" not in capfd.readouterr().err


class Collector(BaseHTTPRequestHandler):
    """What takes OTLP over HTTP: notes the names of the spans."""

    def do_POST(self):
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        asked = ExportTraceServiceRequest.FromString(body)
        spans = [span for of in asked.resource_spans for scope in of.scope_spans for span in scope.spans]
        self.server.got += [(self.path, span.name) for span in spans]
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        """Print nothing."""


def test_a_collector_gets_all_spans_before_the_command_ends(make_run, tmp_path, said):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        server.got = []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        embed(make_run(samples.folder(tmp_path / "in"), traces=f"http://127.0.0.1:{server.server_port}/"))
        server.shutdown()
        thread.join()
    names = {name for _, name in server.got}
    assert {"embed", "listing", "comparison", "embedding", "publication", "decode", "stage 0", "write"} <= names
    assert {path for path, _ in server.got} == {"/v1/traces"}
    assert not [line for line in said if line.startswith("traces ")]
