"""A run as a Prometheus text file, for node_exporter's textfile collector: one file a store, replaced whole.

    embedder_run_exit_code{kind="refresh",store="/data/store"} 0

Source: prometheus.io/docs/instrumenting/exposition_formats (text format 0.0.4).
"""

import os
import tempfile
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

Sample = tuple[dict[str, str], float]

READABLE_BY_ALL = 0o644  # the collector runs as another user; temporary files are private


def write_metrics(path: Path, summary: Mapping[str, Any]) -> None:
    """Replace the file in one step, so that a scrape sees the old or the new one.

    Raises:
        OSError: the file can't be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The collector reads `*.prom` alone, so a file left by a kill is not taken for metrics.
    descriptor, unfinished = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(metrics_text(summary))
        Path(unfinished).chmod(READABLE_BY_ALL)
        Path(unfinished).replace(path)
    except BaseException:
        Path(unfinished).unlink(missing_ok=True)
        raise


def metrics_text(summary: Mapping[str, Any]) -> str:
    """The file's content.

    Args:
        summary: of `embedder.observability.summary.summarise`.
    """
    labels = {"store": str(summary["store"]), "kind": str(summary["kind"])}
    lines: list[str] = []
    for name, description, samples in _families(summary):
        lines += [f"# HELP embedder_{name} {description}", f"# TYPE embedder_{name} gauge"]
        lines += [f"embedder_{name}{_labels(labels | own)} {value!r}" for own, value in samples]
    return "\n".join(lines) + "\n"


def _families(summary: Mapping[str, Any]) -> Iterator[tuple[str, str, list[Sample]]]:
    """Metrics with samples: name, description, and value by labels."""
    plain = {
        "run_end_timestamp_seconds": ("When the last run ended, Unix time.", _unix(summary["ended_at"])),
        "run_exit_code": ("How the last run ended: 0 done, 2 the user's mistake, 1 failed.", summary["exit_code"]),
        "run_published": ("Whether the last run published: 1 or 0.", summary["published"]),
        "held": ("Whether a rollback kept the last run from publishing: 1 or 0.", summary.get("held")),
        "run_duration_seconds": ("How long the last run took.", summary["wall_s"]),
        "run_peak_memory_bytes": ("Most memory of the last run's processes.", summary.get("peak_memory_bytes")),
        "run_items_per_second": ("Items per second of the last run.", summary.get("items_per_s")),
        "published_timestamp_seconds": ("When what readers see was published.", _unix(summary["published_at"])),
        "published_age_seconds": ("Age of it when the last run ended.", summary["published_age_s"]),
    }
    for name, (description, value) in plain.items():
        if value is not None:
            yield name, description, [({}, float(value))]
    counts = {key.removeprefix("num_"): value for key, value in summary.items() if key.startswith("num_")}
    numbers: list[Sample] = [({"what": key}, float(value)) for key, value in counts.items() if _is_number(value)]
    if numbers:
        yield "run_count", "Items, rejects and vectors of the last run.", numbers
    for key, name, description in (
        ("wall_s", "run_step_seconds", "Seconds inside each step of the last run, over all its processes."),
        ("cpu_s", "run_step_cpu_seconds", "CPU seconds of each step of the last run."),
        ("bytes_out", "run_step_bytes", "Bytes that each step of the last run handed on."),
    ):
        steps: list[Sample] = [({"step": step}, float(values[key])) for step, values in summary["steps"].items()]
        if steps:
            yield name, description, steps
    guards: list[Sample] = [({"guard": each["name"]}, float(each["passed"])) for each in summary["guards"]]
    if guards:
        yield "run_guard_passed", "Whether each guard of the last run passed: 1 or 0.", guards


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _unix(moment: str | None) -> float | None:
    return datetime.fromisoformat(moment).timestamp() if moment else None


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items()) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
