"""Metrics of a running command for Prometheus: counts of its journal, states of its operators, age of the store.

    curl http://127.0.0.1:9477/metrics

Counters begin at 0 with each command. Every sample has the store and the kind of the run as labels. Values that need a
request to the store are refreshed on a scrape, at most every `STORE_INTERVAL_S`.
"""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from embedder.batch_schema import Measurement
from embedder.executors.bottleneck import OperatorView, num_running
from embedder.installation import require
from embedder.observability.log import UNWRITABLE
from embedder.redaction import mask
from embedder.storage.printable import printable
from embedder.store.files import StoreFiles
from embedder.store.journal.journal import JournalEntry
from embedder.store.layout import read_current

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector

LOG = logging.getLogger(__name__)
STORE_INTERVAL_S = 10.0
PREFIX = "embedder_live_"


@dataclass(frozen=True)
class LiveMetric:
    """Metric of a running command; its `name` lacks only the `_total` that Prometheus adds to counters.

    `by_step` metrics have the label `step`: decode, stage 0, ..., write.
    """

    name: str
    meaning: str
    is_counter: bool = False
    by_step: bool = False
    on_ray: bool = False


LIVE_METRICS = (
    LiveMetric(f"{PREFIX}started_timestamp_seconds", "When the command began, Unix time."),
    LiveMetric(f"{PREFIX}listed_items", "Items that this command is to embed; none before they are known."),
    LiveMetric(f"{PREFIX}items", "Items finished, embedded or rejected, that the journal holds.", is_counter=True),
    LiveMetric(f"{PREFIX}rejects", "Items that could not be embedded.", is_counter=True),
    LiveMetric(f"{PREFIX}vectors", "Rows with vectors in finished part files.", is_counter=True),
    LiveMetric(f"{PREFIX}part_bytes", "Bytes of finished part files.", is_counter=True),
    LiveMetric(f"{PREFIX}step_rows", "Rows that each step has handled, of finished parts.", True, True),
    LiveMetric(
        f"{PREFIX}step_seconds", "Seconds inside each step over all its processes, of finished parts.", True, True
    ),
    LiveMetric(f"{PREFIX}step_cpu_seconds", "CPU seconds of each step, of finished parts.", True, True),
    LiveMetric(f"{PREFIX}step_bytes", "Bytes that each step has handed on, of finished parts.", True, True),
    LiveMetric(f"{PREFIX}step_peak_memory_bytes", "Most memory of one process of each step so far.", by_step=True),
    LiveMetric(f"{PREFIX}gpu_peak_memory_bytes", "Most GPU memory of one process of a stage; 0 on CPUs.", by_step=True),
    LiveMetric(f"{PREFIX}queue_blocks", "Blocks that wait before each step.", by_step=True, on_ray=True),
    LiveMetric(f"{PREFIX}tasks", "Calls under way of each step.", by_step=True, on_ray=True),
    LiveMetric(f"{PREFIX}replicas", "Actors of each stage that compute, or could.", by_step=True, on_ray=True),
    LiveMetric(f"{PREFIX}cpus", "CPUs that each step holds.", by_step=True, on_ray=True),
    LiveMetric(f"{PREFIX}gpus", "GPUs that each step holds.", by_step=True, on_ray=True),
    LiveMetric(
        f"{PREFIX}busy_share",
        "Part of the last 20 s that the replicas of each step were inside calls, 0 to 1; 1 minus it is idle.",
        by_step=True,
        on_ray=True,
    ),
    LiveMetric(
        f"{PREFIX}waiting_share", "Part of the last 20 s that blocks waited for each step, 0 to 1.", False, True, True
    ),
    LiveMetric(f"{PREFIX}bottleneck", "1 for the step that the others wait for, else 0.", by_step=True, on_ray=True),
    LiveMetric(f"{PREFIX}object_store_bytes", "Bytes in Ray's object store that each step made.", False, True, True),
    LiveMetric(f"{PREFIX}moved_bytes", "Bytes that each step took from another node.", True, True, True),
    LiveMetric(f"{PREFIX}spilled_bytes", "Bytes that Ray moved to disk before each step took them.", True, True, True),
    LiveMetric("embedder_published_timestamp_seconds", "When what readers see was published, Unix time."),
    LiveMetric("embedder_published_age_seconds", "Seconds since then, now; after a run's end, as of its end."),
    LiveMetric("embedder_index_recall", "Recall@10 of the published index on its held-out queries, 0 to 1."),
)
"""All metrics that a running command may have, in the order of the page."""

Samples = dict[str, float]
"""Values by step; the key is an empty string if a metric has no steps."""


class LiveMetrics:
    """Values of a running command; one thread feeds them, and one reads them."""

    def __init__(self, store: str | None, kind: str, started_s: float) -> None:
        """Start without counts; `store` is an address, or None, and `started_s` the command's start (Unix time)."""
        self._lock = threading.Lock()
        self._labels = printable(mask(store or "")), kind
        self._store = PublishedState(store)
        self._values: dict[str, Samples] = defaultdict(dict)
        self._set("started_timestamp_seconds", started_s)
        for name in ("items", "rejects", "vectors", "part_bytes"):
            self._set(name, 0)

    def on_listed(self, num_items: int) -> None:
        """Record the number of items that are to be embedded."""
        with self._lock:
            self._set("listed_items", num_items)

    def on_entry(self, entry: JournalEntry) -> None:
        """Add what a write task has finished."""
        num_vectors = sum(part.num_rows for part in entry.parts if part.table == "embeddings")
        num_bytes = sum(part.size_bytes for part in entry.parts)
        with self._lock:
            self._add("items", entry.num_items)
            self._add("rejects", entry.num_rejects)
            self._add("vectors", num_vectors)
            self._add("part_bytes", num_bytes)
            for call in (Measurement(**call) for call in entry.trace):
                for name, value in (
                    ("step_rows", call.num_rows),
                    ("step_seconds", call.wall_s),
                    ("step_cpu_seconds", call.cpu_s),
                    ("step_bytes", call.bytes_out),
                ):
                    self._add(name, value, call.step)
                self._raise("step_peak_memory_bytes", call.peak_rss_bytes, call.step)
                if call.step.startswith("stage"):
                    self._raise("gpu_peak_memory_bytes", call.peak_gpu_bytes, call.step)

    def operators(self, view: OperatorView) -> None:
        """Record the states of a run's operators on Ray."""
        with self._lock:
            for state in view.operators:
                for name, attribute in OF_STATE.items():
                    self._set(name, getattr(state, attribute), state.name)
                if state.name.startswith("stage"):
                    self._set("replicas", num_running(state), state.name)
                self._set("bottleneck", state.name == view.bottleneck, state.name)
            for use in view.uses:
                self._set("busy_share", use.busy_share, use.name)
                self._set("waiting_share", use.waiting_share, use.name)

    def engine_ended(self) -> None:
        """Forget the states of finished operators; their counts stay."""
        with self._lock:
            for metric in LIVE_METRICS:
                if metric.on_ray and not metric.is_counter:
                    self._values.pop(metric.name, None)

    def samples(self) -> Iterator[tuple[LiveMetric, Samples]]:
        """Yield the metrics that have values, with these."""
        with self._lock:
            values = {name: dict(samples) for name, samples in self._values.items()}
        for name, value in self._store.values(time.time()).items():
            values[name] = {"": value}
        return ((metric, values[metric.name]) for metric in LIVE_METRICS if metric.name in values)

    def collect(self) -> "Iterator[CounterMetricFamily | GaugeMetricFamily]":
        """Yield the families of all metrics; prometheus_client calls this on a scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for metric, samples in self.samples():
            family = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
            made = family(metric.name, metric.meaning, labels=["store", "kind", *(["step"] if metric.by_step else [])])
            for step, value in samples.items():
                made.add_metric([*self._labels, *([step] if metric.by_step else [])], float(value))
            yield made

    def _set(self, name: str, value: float, step: str = "") -> None:
        self._values[PREFIX + name][step] = value

    def _add(self, name: str, value: float, step: str = "") -> None:
        self._set(name, self._values[PREFIX + name].get(step, 0) + value, step)

    def _raise(self, name: str, value: float, step: str) -> None:
        self._set(name, max(self._values[PREFIX + name].get(step, 0), value), step)


OF_STATE: Mapping[str, str] = {
    "queue_blocks": "queued_blocks",
    "tasks": "num_tasks",
    "cpus": "num_cpus",
    "gpus": "num_gpus",
    "object_store_bytes": "object_store_bytes",
    "moved_bytes": "moved_bytes",
    "spilled_bytes": "spilled_bytes",
}
"""Metrics that are attributes of an operator's state, with the attributes' names."""


class PublishedState:
    """What readers see of a store, refreshed from time to time."""

    def __init__(self, store: str | None, read: "Callable[[str], PublishedFigures | None] | None" = None) -> None:
        self._address, self._read = store, read or read_published
        self._next_s = 0.0
        self._found: PublishedFigures | None = None

    def values(self, now_s: float) -> dict[str, float]:
        """Return the metrics at a Unix time; none if nothing is published, or the store doesn't answer now."""
        if self._address is not None and now_s >= self._next_s:
            try:
                self._found = self._read(self._address)
            except UNWRITABLE:
                self._found = None
            self._next_s = now_s + STORE_INTERVAL_S
        if self._found is None:
            return {}
        found = {
            "embedder_published_timestamp_seconds": self._found.at_s,
            "embedder_published_age_seconds": max(now_s - self._found.at_s, 0.0),
        }
        return found if self._found.recall is None else {**found, "embedder_index_recall": self._found.recall}


@dataclass(frozen=True)
class PublishedFigures:
    """Unix time of a publication, and recall@10 of its index, if it has one."""

    at_s: float
    recall: float | None


def read_published(store: str) -> PublishedFigures | None:
    """Read what is published; None if nothing is. Raises an OSError, StoreError or StoreUnavailableError."""
    from embedder.store_index.index_versions import manifest_of

    files = StoreFiles(store)
    current = read_current(files)
    if current is None:
        return None
    manifest = manifest_of(files, current.index) if current.index is not None else None
    return PublishedFigures(current.published_at.timestamp(), manifest.recall_at_10 if manifest is not None else None)


@contextmanager
def answering(address: str | None, metrics: LiveMetrics) -> Iterator[int | None]:
    """Serve metrics to Prometheus over HTTP inside the block; an occupied port is logged, and isn't an error.

    `address` is HOST:PORT, or :PORT for only this machine; None serves nobody. Yields the port; None if nothing
    listens. Raises `InstallationError` if prometheus_client is missing.
    """
    if address is None:
        yield None
        return
    require("embed", "metrics_address")
    from prometheus_client import CollectorRegistry, start_http_server

    host, _, port = address.rpartition(":")
    registry = CollectorRegistry()
    registry.register(cast("Collector", metrics))
    try:
        server, thread = start_http_server(int(port), host.strip("[]") or "127.0.0.1", registry)
    except (OSError, OverflowError, UnicodeError) as error:  # of a port above 65535, of a host that can be no name
        reason = getattr(error, "strerror", None) or error
        LOG.warning(f"metrics_address {address}: can't be listened on ({reason}); choose another port")
        yield None
        return
    LOG.info(f"metrics of this run: http://{host or '127.0.0.1'}:{server.server_port}/metrics")
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
