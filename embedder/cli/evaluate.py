"""`embedder evaluate`: an evaluation of what a store has published, shown and saved."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

from embedder.cli.options import AsJson, ConfigFile, ModelUri, PublishedBy, Settings, StoreUri
from embedder.cli.results import Result, print_result
from embedder.cli.store_access import open_published
from embedder.cli.terminal import TerminalWatcher
from embedder.config import load_config
from embedder.errors import ConfigError
from embedder.storage.atomic_write import atomic_write

if TYPE_CHECKING:
    from embedder.evaluation.report import Evaluation

FILE_HELP = "Parquet, CSV or JSON Lines with the columns query and item_id; the store's captions else."
GROUP_HELP = "Column to split the figures by, of FILE or of the embeddings table."
NUM_HELP = "Ask at most so many; by default all of FILE, or 2,000 captions."
REPORT_NAME = "evaluation.json"
PLOT_NAME = "recall_latency.png"


def evaluate(
    store: StoreUri = None,
    queries: Annotated[str | None, typer.Option(metavar="FILE", help=FILE_HELP)] = None,
    k: Annotated[int, typer.Option("-k", min=1, help="A depth to report, beside 1, 5 and 10.")] = 10,
    group: Annotated[str | None, typer.Option(metavar="COLUMN", help=GROUP_HELP)] = None,
    num_queries: Annotated[int | None, typer.Option(min=1, help=NUM_HELP)] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for evaluation.json and recall_latency.png.")] = None,
    version: PublishedBy = None,
    model: ModelUri = None,
    config: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Measure R@k, recall of the index, latency and memory, with confidence intervals."""
    run = load_config(config, {"store": store, "model": model}, settings or ())

    from embedder.cli.render_evaluation import evaluation_parts
    from embedder.evaluation.evaluate import EvaluationOptions
    from embedder.evaluation.evaluate import evaluate as run_evaluation

    options = EvaluationOptions(queries=queries, k=k, group=group, num_queries=num_queries)
    found = run_evaluation(open_published(run, version), options, TerminalWatcher().say)
    saved = save_evaluation(found, out) if out is not None else []
    print_result(as_json, Result(found.model_dump(mode="json"), [*evaluation_parts(found), *saved]))


def save_evaluation(found: "Evaluation", out: Path) -> list[RenderableType]:
    """Write the report and, where there is an index, the plot, each whole or not at all; returns lines that name them.

    Raises:
        ConfigError: the folder can't be made.
    """
    from embedder.evaluation.plot import draw_curve

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}; name a folder, which is made where it is missing") from None
    with atomic_write(out / REPORT_NAME) as file:
        file.write(found.model_dump_json(indent=2).encode() + b"\n")
    lines: list[RenderableType] = [f"report: {out / REPORT_NAME}"]
    if found.index is not None:
        title = f"{found.num_pictures:,} pictures, {found.queries.num_queries:,} text queries"
        draw_curve(out / PLOT_NAME, found.index, title)
        lines.append(f"plot: {out / PLOT_NAME}")
    return lines
