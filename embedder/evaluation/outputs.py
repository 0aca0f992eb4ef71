"""Files of an evaluation, and the evaluation as a tracker is told of it."""

import json
from collections.abc import Iterator
from pathlib import Path

from embedder.config import RunConfig
from embedder.evaluation.evaluate import EvaluationOptions, evaluate
from embedder.evaluation.plot import draw_curve
from embedder.evaluation.report import Evaluation
from embedder.observability.run_tracking import parameters_of
from embedder.observability.trackers import Tracker, tracked
from embedder.quantities import counted
from embedder.redaction import mask
from embedder.retrieval.store_api import Store
from embedder.storage.atomic_write import atomic_write
from embedder.storage.printable import printable

REPORT_NAME = "evaluation.json"
PLOT_NAME = "recall_latency.png"
TRACKER_NAME = "tracker.json"


def evaluation_files(found: Evaluation) -> dict[str, bytes]:
    """Report and, where there is an index, the plot of its recall, by their names."""
    files = {REPORT_NAME: found.model_dump_json(indent=2).encode() + b"\n"}
    if found.index is not None:
        asked = counted(found.queries.num_queries, "text query", "text queries")
        files[PLOT_NAME] = draw_curve(found.index, f"{counted(found.num_pictures, 'image')}, {asked}")
    return files


def evaluate_tracked(
    store: Store, config: RunConfig, options: EvaluationOptions, out: Path | None = None
) -> Evaluation:
    """Evaluate a store, and tell the tracker of the configuration.

    Args:
        store: opened.
        config: its `[tracker]`; its keys are the tracker's parameters.
        options: of the evaluation.
        out: folder that gets the tracker's id of the run, `tracker.json`.
    """
    with tracked(config.tracker, "embedder evaluate") as tracker:
        _begin(tracker, store, config, options, out)
        found = evaluate(store, options)
        tracker.log(dict(_figures(found)), step=0)
        for step, point in enumerate(found.index.curve if found.index else ()):
            values = {"recall_at_10": point.recall_at_10.value, "p50_ms": point.p50_ms, "p99_ms": point.p99_ms}
            tracker.log({f"curve/{name}": value for name, value in values.items()}, step=step)
        tracker.attach(lambda: evaluation_files(found))
        tracker.end(succeeded=True, files={})
    return found


def _begin(tracker: Tracker, store: Store, config: RunConfig, options: EvaluationOptions, out: Path | None) -> None:
    """Begin the tracker's run; each knows the other's id."""
    run_id = store.publication.run_id
    asked = {"queries": options.queries, "group": options.group, "num_queries": options.num_queries, "k": options.k}
    told = {f"evaluate.{name}": printable(mask(str(value))) for name, value in asked.items() if value is not None}
    tags = {
        "embedder.run_id": run_id,
        "embedder.store": printable(mask(store.files.address)),
        "embedder.kind": "evaluate",
        "embedder.model_fingerprint": store.info.model_fingerprint,
    }

    def write_id(tracker_id: str) -> None:
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            with atomic_write(out / TRACKER_NAME) as file:
                file.write(json.dumps({"id": tracker_id}).encode() + b"\n")

    tracker.begin(f"evaluate {run_id}", parameters_of(config) | told, tags, write_id)


def _figures(found: Evaluation) -> Iterator[tuple[str, float]]:
    """Figures of the model, of its index, and of each group."""
    yield from ((f"model/r_at_{k}", figure.value) for k, figure in found.model.r_at.items())
    yield "model/mrr", found.model.mrr.value
    if found.model.ndcg_at_10 is not None:
        yield "model/ndcg_at_10", found.model.ndcg_at_10.value
    if (index := found.index) is not None:
        yield from ((f"index/r_at_{k}", figure.value) for k, figure in index.r_at.items())
        yield from ((f"index/recall_at_{k}", figure.value) for k, figure in index.recall_at.items())
        yield "index/p50_ms", index.one_thread.p50_ms
        yield "index/p99_ms", index.one_thread.p99_ms
        yield "index/resident_bytes", index.resident_bytes
    yield "num_queries", found.queries.num_queries
    yield "num_items", found.num_items
