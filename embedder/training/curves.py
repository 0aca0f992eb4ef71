"""Plot of a training run: loss above, R@k below, over steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embedder.storage.atomic_write import atomic_write
from embedder.storage.printable import printable

Metrics = Sequence[dict[str, Any]]

SIZE_INCH = (8, 7)
DOTS_PER_INCH = 110
SMOOTHING = 0.9  # of the bold line: the weight of the point before


def draw_curves(path: Path, metrics: Metrics, title: str) -> None:
    """Write a PNG, whole or not at all.

    Args:
        path: the file.
        metrics: lines of metrics.jsonl, of both kinds.
        title: above the plot.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCH, dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(printable(title), parse_math=False)
    above, below = figure.subplots(2, 1, sharex=True)
    _draw_loss(above, [line for line in metrics if line["kind"] == "train"])
    _draw_retrieval(below, [line for line in metrics if line["kind"] == "validation"])
    with atomic_write(path) as file:
        figure.savefig(file, format="png")


def _draw_loss(axes: Any, lines: Metrics) -> None:
    steps, losses = [line["step"] for line in lines], [line["loss"] for line in lines]
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=1)
    axes.plot(steps, smoothed(losses), color="tab:blue", linewidth=1.5)
    axes.set_ylabel("training loss")
    axes.grid(alpha=0.3)


def _draw_retrieval(axes: Any, lines: Metrics) -> None:
    steps = [line["step"] for line in lines]
    for k in (1, 5, 10):
        axes.plot(steps, [line[f"r_at_{k}"] for line in lines], marker=".", label=f"R@{k}")
    if lines:
        axes.axhline(min(1, 10 / lines[-1]["num_pictures"]), color="grey", linestyle=":", label="R@10 by chance")
        axes.legend(loc="upper left")
    axes.set(ylabel="held-out text to image", xlabel="step", ylim=(0, 1))
    axes.grid(alpha=0.3)


def smoothed(values: Sequence[float]) -> list[float]:
    """Exponential mean that starts at the first value."""
    result: list[float] = []
    for value in values:
        result.append(value if not result else SMOOTHING * result[-1] + (1 - SMOOTHING) * value)
    return result
