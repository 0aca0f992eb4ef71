"""Files and figures of an evaluation."""

from collections.abc import Iterator

from embedder.plugins.evaluate.evaluate_report import Evaluation
from embedder.plugins.evaluate.plot import draw_curve
from embedder.quantities import plural

REPORT_NAME = "evaluation.json"
PLOT_NAME = "recall_latency.png"
TRACKER_NAME = "tracker.json"


def evaluation_files(found: Evaluation) -> dict[str, bytes]:
    """Report and, if there is an index, the plot of its recall, by file name."""
    files = {REPORT_NAME: found.model_dump_json(indent=2).encode() + b"\n"}
    if found.index is not None:
        asked = plural(found.queries.num_queries, "text query", "text queries")
        files[PLOT_NAME] = draw_curve(found.index, f"{plural(found.num_pictures, 'image')}, {asked}")
    return files


def list_figures(found: Evaluation) -> Iterator[tuple[str, float]]:
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
    if (rerank := found.rerank) is not None:
        yield from ((f"rerank/r_at_{k}", figure.value) for k, figure in rerank.r_at.items())
        yield "rerank/mrr", rerank.mrr.value
        yield "rerank/p50_ms", rerank.seconds.p50_ms
    yield "num_queries", found.queries.num_queries
    yield "num_items", found.num_items
