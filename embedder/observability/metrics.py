"""A run as a Prometheus text file, for node_exporter's textfile collector: one file per store, replaced atomically.

embedder_run_exit_code{kind="refresh",store="/data/store"} 0.0

The store and the kind of the run are labels of each sample.
"""

import os
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from embedder.storage.atomic_write import atomic_write

READABLE_BY_ALL = 0o644  # the collector runs as another user, and the umask may make files private


def write_metrics(path: Path, summary: Mapping[str, Any]) -> None:
    """Replace the file in one step, so that a scrape sees the old or the new one; raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The collector only reads `*.prom`, so it ignores a temporary file left by a kill.
    with atomic_write(path) as file:
        file.write(metrics_text(summary).encode())
        os.fchmod(file.fileno(), READABLE_BY_ALL)


def metrics_text(summary: Mapping[str, Any]) -> str:
    """Return a summary of `embedder.observability.run_summary.summarise` in Prometheus' text format."""
    from prometheus_client import CollectorRegistry, generate_latest  # takes 60 ms, which only runs with metrics need
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.registry import Collector

    store, kind = str(summary["store"]), str(summary["kind"])

    class Gauges(Collector):
        def collect(self) -> Iterator[GaugeMetricFamily]:
            for name, description, label, samples in _families(summary):
                own = [label] if label else []
                gauge = GaugeMetricFamily(f"embedder_{name}", description, labels=["store", "kind", *own])
                for key, value in samples.items():
                    gauge.add_metric([store, kind, *([key] if label else [])], float(value))
                if samples:
                    yield gauge

    registry = CollectorRegistry()
    registry.register(Gauges())
    return generate_latest(registry).decode()


def _families(summary: Mapping[str, Any]) -> Iterator[tuple[str, str, str | None, Mapping[str, Any]]]:
    """Yield name, description, own label or None, and values by that label of each metric; without unknown ones."""
    for name, description, value in (
        ("run_end_timestamp_seconds", "When the last run ended, Unix time.", _unix(summary["ended_at"])),
        (
            "run_exit_code",
            "How the last run ended: 0 done, 2 the user's mistake, 1 failed, 128 + n by signal n.",
            summary["exit_code"],
        ),
        ("run_published", "Whether the last run published: 1 or 0.", summary["published"]),
        ("held", "Whether a rollback kept the last run from publishing: 1 or 0.", summary.get("held")),
        ("run_duration_seconds", "How long the last run took.", summary["wall_s"]),
        ("run_peak_memory_bytes", "Most memory of the last run's processes.", summary.get("peak_memory_bytes")),
        ("run_items_per_second", "Items per second of the last run.", summary.get("items_per_s")),
        ("published_timestamp_seconds", "When what readers see was published.", _unix(summary["published_at"])),
        ("published_age_seconds", "Age of it when the last run ended.", summary["published_age_s"]),
    ):
        yield name, description, None, {"": value} if value is not None else {}
    counts = {key.removeprefix("num_"): value for key, value in summary.items() if key.startswith("num_")}
    counts = {key: value for key, value in counts.items() if isinstance(value, int | float)}
    yield "run_count", "Items, rejects and vectors of the last run.", "what", counts
    for key, name, description in (
        ("wall_s", "run_step_seconds", "Seconds inside each step of the last run, over all its processes."),
        ("cpu_s", "run_step_cpu_seconds", "CPU seconds of each step of the last run."),
        ("bytes_out", "run_step_bytes", "Bytes that each step of the last run handed on."),
    ):
        yield name, description, "step", {step: values[key] for step, values in summary["steps"].items()}
    figures = {
        f"{name}.{key}": value
        for name, found in summary.get("metrics", {}).items()
        for key, value in found.items()
        if isinstance(value, int | float)
    }
    yield "run_metric", "Figures of each [[metric]] of the last run, as NAME.FIGURE.", "metric", figures
    guards = {verdict["name"]: verdict["passed"] for verdict in summary["guards"]}
    yield "run_guard_passed", "Whether each guard of the last run passed: 1 or 0.", "guard", guards


def _unix(moment: str | None) -> float | None:
    return datetime.fromisoformat(moment).timestamp() if moment else None
