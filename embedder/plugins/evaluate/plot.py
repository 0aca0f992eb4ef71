"""Plot of recall against latency: one point for each search setting of the index, with the published one marked."""

from io import BytesIO

from embedder.plugins.evaluate.evaluate_report import IndexFigures

SIZE_INCH = (7, 5)
DOTS_PER_INCH = 110
TOP = 1.01  # recall ends at 1, and a point there should be fully visible


def draw_curve(figures: IndexFigures, title: str) -> bytes:
    """Draw a PNG."""
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
