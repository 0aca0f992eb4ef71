"""Files and figures of an evaluation."""

from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path

from embedder.errors import ConfigError
from embedder.plugins.evaluate.evaluate_report import Evaluation, IndexFigures
from embedder.quantities import plural
from embedder.storage.atomic_write import atomic_write

REPORT_NAME = "evaluation.json"
PLOT_NAME = "recall_latency.png"
TRACKER_NAME = "tracker.json"
SIZE_INCH = (7, 5)
DOTS_PER_INCH = 110
TOP = 1.01  # recall ends at 1, and a point there should be fully visible


def evaluation_files(found: Evaluation) -> dict[str, bytes]:
    """Report and, if there is an index, the plot of its recall, by file name."""
    files = {REPORT_NAME: found.model_dump_json(indent=2).encode() + b"\n"}
    if found.index is not None:
        asked = plural(found.queries.num_queries, "text query", "text queries")
        files[PLOT_NAME] = draw_curve(found.index, f"{plural(found.num_pictures, 'image')}, {asked}")
    return files


def save_files(out: Path, files: Mapping[str, bytes]) -> None:
    """Write files into a folder, each whole or not at all; a ConfigError if that can't be made or written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            with atomic_write(out / name) as file:
                file.write(content)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror or error}; name a folder that can be written") from None


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


def draw_curve(figures: IndexFigures, title: str) -> bytes:
    """Draw recall against latency as a PNG, a point for each setting of the index's search; the published is marked."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCH, dpi=DOTS_PER_INCH, layout="constrained")
    axes = figure.subplots()
    curve = figures.curve
    latencies, recalls = [point.p50_ms for point in curve], [point.recall_at_10.value for point in curve]
    below = [point.recall_at_10.value - point.recall_at_10.low for point in curve]
    above = [point.recall_at_10.high - point.recall_at_10.value for point in curve]
    axes.errorbar(latencies, recalls, yerr=(below, above), marker="o", markersize=4, capsize=2, label=figures.design)
    for point in curve:
        label = ", ".join(f"{name} {value}" for name, value in point.parameters.items())
        where = (point.p50_ms, point.recall_at_10.value)
        axes.annotate(label, where, xytext=(4, -11), textcoords="offset points", fontsize=7)
        if point.is_published:
            axes.plot(*where, marker="*", markersize=14, color="tab:red", linestyle="", label="published")
    axes.set(title=title, xlabel="median latency of one query, one thread, ms", ylabel="recall@10 against exact search")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(top=TOP)
    axes.grid(alpha=0.3, which="both")
    axes.legend(loc="lower right")
    file = BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
