"""Run an evaluation and save it."""

from pathlib import Path

from rich.console import RenderableType

from embedder.cli.commands import Result, open_published
from embedder.cli.render import TerminalWatcher
from embedder.cli.render_evaluation import evaluation_parts
from embedder.config import RunConfig
from embedder.errors import ConfigError
from embedder.evaluation.evaluate import EvaluationOptions
from embedder.evaluation.evaluate import evaluate as run_evaluation
from embedder.evaluation.plot import draw_curve
from embedder.evaluation.report import Evaluation

REPORT_NAME = "evaluation.json"
PLOT_NAME = "recall_latency.png"


def evaluate(config: RunConfig, options: EvaluationOptions, out: Path | None, version: str | None = None) -> Result:
    """Evaluate what the store has published, or had by some run."""
    found = run_evaluation(open_published(config, version), options, TerminalWatcher().say)
    shown = evaluation_parts(found)
    if out is not None:
        shown += save(found, out)
    return Result(found.model_dump(mode="json"), shown)


def save(found: Evaluation, out: Path) -> list[RenderableType]:
    """Write the report and, where there is an index, the plot; each whole or not at all.

    Raises:
        ConfigError: the folder can't be made.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}; name a folder, which is made where it is missing") from None
    temporary = out / f".{REPORT_NAME}.tmp"
    temporary.write_text(found.model_dump_json(indent=2) + "\n", encoding="utf-8")
    temporary.replace(out / REPORT_NAME)
    lines: list[RenderableType] = [f"report: {out / REPORT_NAME}"]
    if found.index is not None:
        title = f"{found.num_pictures:,} pictures, {found.queries.num_queries:,} text queries"
        draw_curve(out / PLOT_NAME, found.index, title)
        lines.append(f"plot: {out / PLOT_NAME}")
    return lines
