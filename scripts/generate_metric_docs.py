#!/usr/bin/env python3
"""Write the tables of docs/observability.md: every metric with its unit, labels and meaning, read from what exports it.

python scripts/generate_metric_docs.py
"""

import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from embedder.executors.datasink import RAY_COUNTERS
from embedder.observability.live_metrics import LIVE_METRICS
from embedder.observability.metrics import metrics_text
from embedder.observability.run_summary import FIGURES, STEP_FIGURES, summarise
from embedder.plugins.serve.serve_metrics import Metrics

PAGE = Path(__file__).parents[1] / "docs/observability.md"
BLOCK = re.compile(r"(?<=<!-- metrics: (\w{3}) -->\n).*?(?=<!-- end of the metrics -->)", re.DOTALL)
COLUMNS = ("metric", "unit", "labels", "meaning")
YES_OR_NO = ("bottleneck", "published", "held", "passed")
STORE_LABELS = ("store", "kind")

Row = tuple[str, str, tuple[str, ...], str]
"""Name, unit, labels besides those of all, meaning."""


def page() -> str:
    makers = {"run": _live, "end": _text_file, "ray": _of_ray, "web": _service}
    text = PAGE.read_text(encoding="utf-8")
    return BLOCK.sub(lambda found: "\n".join(["", *_table(makers[found[1]]()), "", ""]), text)


def _table(rows: Iterable[Row]) -> Iterator[str]:
    yield f"| {' | '.join(COLUMNS)} |"
    yield f"| {' | '.join(['---'] * len(COLUMNS))} |"
    for name, unit, labels, meaning in rows:
        shown = ", ".join(f"`{label}`" for label in labels)
        yield f"| `{name}` | {unit} | {shown} | {meaning.rstrip('.')} |"


def _live() -> Iterator[Row]:
    for metric in LIVE_METRICS:
        name = f"{metric.name}_total" if metric.is_counter else metric.name
        on_ray = " (on Ray)" if metric.on_ray else ""
        yield name, unit_of(metric.name), ("step",) if metric.by_step else (), metric.meaning.rstrip(".") + on_ray


def _text_file() -> Iterator[Row]:
    """Rows of the file that a run with everything in it would write."""
    now = datetime(2026, 1, 1, tzinfo=UTC)
    report = dict.fromkeys(FIGURES, 1.0) | {
        "num_items": 1, "held": False, "steps": [{"step": "decode", **dict.fromkeys(STEP_FIGURES, 1)}],
        "guards": [{"name": "rejects", "passed": True}], "metrics": {"price": {"mean": 1.0}},
    }  # fmt: skip
    text = metrics_text(summarise("refresh", "store", 0, "done", (now, now), 0.0, report, now))
    for family in text_string_to_metric_families(text):
        labels = tuple(label for label in family.samples[0].labels if label not in STORE_LABELS)
        yield family.name, unit_of(family.name), labels, family.documentation


def _of_ray() -> Iterator[Row]:
    for name, meaning in RAY_COUNTERS.items():
        whole = f"ray_embedder_{name}"
        yield f"{whole}_total", unit_of(whole), ("step",) if name.startswith("step_") else (), meaning


def _service() -> Iterator[Row]:
    metrics = Metrics()
    # What has labels has no samples until it is used, and shows them nowhere else.
    labels = {each._name: tuple(each._labelnames) for each in vars(metrics).values() if hasattr(each, "_labelnames")}
    endings = {"counter": "_total", "histogram": "_bucket", "info": "_info"}
    for family in metrics.registry.collect():
        named = ("run_id", "version") if family.type == "info" else labels.get(family.name, ())
        yield family.name + endings.get(family.type, ""), unit_of(family.name), named, family.documentation


def unit_of(name: str) -> str:
    """Unit of a metric, as its name says it."""
    last = name.rpartition("_")[2]
    if name.endswith("_timestamp_seconds"):
        return "Unix time"
    if last in ("seconds", "bytes"):
        return last
    if last in ("share", "recall"):
        return "0 to 1"
    if last in YES_OR_NO:
        return "0 or 1"
    return "per second" if name.endswith("_per_second") else "number"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
