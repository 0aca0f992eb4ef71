"""OpenTelemetry traces of a run: spans of its phases, and of a sample of each step's batches; the extra `otel`.

    embed                                  the command
      listing, comparison, embedding, publication
        decode, stage 0, ..., write        batches, each on the node and process that computed it

Batches come from the journal, which has start and duration of each, so the processes of steps needn't know about
traces. No failure here fails a run: if a collector doesn't answer, only its spans are lost.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedder.batch_schema import Measurement
from embedder.installation import require
from embedder.redaction import mask
from embedder.storage.printable import printable
from embedder.storage.web_address import is_web
from embedder.store.journal.journal import JournalEntry

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

LOG = logging.getLogger(__name__)
SERVICE = "embedder"
NS_PER_S = 1_000_000_000
ALL_OF = 100  # first batches of a step that each have a span; of the next 900 every tenth, then every hundredth
COLLECTOR_TIMEOUT_S = 5.0
TRACES_PATH = "/v1/traces"


class RunTraces:
    """Traces of one run; these, of a run without tracing, do nothing."""

    def span(self, name: str) -> AbstractContextManager[object]:
        """Measure a phase of the run."""
        return nullcontext()

    def on_entry(self, entry: JournalEntry) -> None:
        """Record the batches of a finished write task."""

    def describe(self, **attributes: Any) -> None:
        """Set attributes of the run; None values are left out."""


class TracedRun(RunTraces):
    """Spans of one run, below the span of its command."""

    def __init__(self, tracer: "Tracer", root: "Span") -> None:
        self._tracer, self._root, self._phase = tracer, root, root
        self._num_batches: Counter[str] = Counter()

    @contextmanager
    def span(self, name: str) -> Iterator[object]:
        """Measure a phase of the run; an error is recorded by its type only, as messages may contain file names."""
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        span, before = self._tracer.start_span(name, set_span_in_context(self._root)), self._phase
        self._phase = span
        try:
            yield span
        except BaseException as error:
            span.set_status(Status(StatusCode.ERROR, type(error).__name__))
            raise
        finally:
            self._phase = before
            span.end()

    def on_entry(self, entry: JournalEntry) -> None:
        """Make spans for a sample of a write task's batches."""
        from opentelemetry.trace import set_span_in_context

        inside = set_span_in_context(self._phase)
        for call in (Measurement(**each) for each in entry.trace):
            number = self._num_batches[call.step]
            self._num_batches[call.step] += 1
            if not is_sampled(number):
                continue
            span = self._tracer.start_span(call.step, inside, start_time=int(call.started_s * NS_PER_S))
            for name, value in (
                ("rows", call.num_rows),
                ("cpu_s", call.cpu_s),
                ("bytes_out", call.bytes_out),
                ("node", call.node),
                ("pid", call.pid),
                ("batch", number),
            ):
                span.set_attribute(f"embedder.{name}", value)
            span.end(int((call.started_s + call.wall_s) * NS_PER_S))

    def describe(self, **attributes: Any) -> None:
        """Set attributes of the run; None values are left out."""
        for name, value in attributes.items():
            if value is not None:
                self._root.set_attribute(f"embedder.{name}", value)


def is_sampled(number: int) -> bool:
    """Return whether a step's batch number (from 0) gets a span."""
    every = 1 if number < ALL_OF else 10 if number < 10 * ALL_OF else 100
    return number % every == 0


@contextmanager
def trace_run(target: str | None, kind: str, store: str | None) -> Iterator[RunTraces]:
    """Trace the block to a collector's address or a file (None: not at all); InstallationError without `otel`."""
    if target is None:
        yield RunTraces()
        return
    require("otel", "traces")
    try:
        exporter = _exporter(target)
    except OSError as error:
        LOG.warning(f"traces {target}: can't be written ({error.strerror or error}); this run is not traced")
        yield RunTraces()
        return
    with _told_once(target), export_traces(exporter, kind, store) as traces:
        yield traces


class _Problems(logging.Handler):
    """Handler that keeps only OpenTelemetry's last message; by default each of its attempts would be printed."""

    last = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()


@contextmanager
def _told_once(target: str) -> Iterator[None]:
    """Log in one line, after the block, that spans could not be sent."""
    problems, theirs = _Problems(logging.WARNING), logging.getLogger("opentelemetry")
    theirs.addHandler(problems)
    try:
        yield
    finally:
        theirs.removeHandler(problems)
        if problems.last:
            LOG.warning(f"traces {target}: spans were not sent ({problems.last}); check that a collector listens there")


@contextmanager
def export_traces(exporter: "SpanExporter", kind: str, store: str | None) -> Iterator[TracedRun]:
    """Trace the block into an exporter, which is shut down at its end."""
    from opentelemetry.trace import Status, StatusCode

    provider = _provider(exporter)
    tracer = provider.get_tracer(SERVICE)
    root = tracer.start_span(kind)
    run = TracedRun(tracer, root)
    run.describe(kind=kind, store=printable(mask(store)) if store else None)
    try:
        yield run
    except BaseException as error:
        root.set_status(Status(StatusCode.ERROR, type(error).__name__))
        raise
    finally:
        root.end()
        provider.shutdown()


def _provider(exporter: "SpanExporter") -> "TracerProvider":
    """Return a provider for only this run: the program's own traces stay separate, and no environment is detected."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON

    from embedder.version import __version__

    resource = Resource.create({"service.name": SERVICE, "service.version": __version__})
    provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _exporter(target: str) -> "SpanExporter":
    """Return an exporter to a collector, or to a file; raises `OSError` if the file can't be written."""
    if is_web(target):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        endpoint = target if target.endswith(TRACES_PATH) else target.rstrip("/") + TRACES_PATH
        return OTLPSpanExporter(endpoint=endpoint, timeout=COLLECTOR_TIMEOUT_S)
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter

    path = Path(target).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a", encoding="utf-8")

    class FileSpanExporter(ConsoleSpanExporter):
        def shutdown(self) -> None:
            file.close()

    return FileSpanExporter(out=file, formatter=lambda span: json.dumps(json.loads(span.to_json())) + "\n")
