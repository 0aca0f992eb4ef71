"""The command `embedder evaluate`."""

from pathlib import Path
from typing import Annotated

import typer

from embedder.cli.options import AsJson, ConfigFile, ModelUri, Settings, StoreUri, print_result
from embedder.config import load_config

FILE_HELP = "Parquet, CSV or JSON Lines with the columns query and item_id; the store's captions else."
GROUP_HELP = "Column to split the figures by, of FILE or of the embeddings table."
NUM_HELP = "Ask at most so many; by default all of FILE, or 2,000 captions."


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(evaluate)


def evaluate(
    store: StoreUri = None,
    queries: Annotated[str | None, typer.Option(metavar="FILE", help=FILE_HELP)] = None,
    k: Annotated[int, typer.Option("-k", min=1, help="A depth to report, beside 1, 5 and 10.")] = 10,
    group: Annotated[str | None, typer.Option(metavar="COLUMN", help=GROUP_HELP)] = None,
    num_queries: Annotated[int | None, typer.Option(min=1, help=NUM_HELP)] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for evaluation.json and recall_latency.png.")] = None,
    version: Annotated[str | None, typer.Option(metavar="RUN_ID", help="As it was published by that run.")] = None,
    model: ModelUri = None,
    config: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Measure R@k, recall of the index, latency and memory, with confidence intervals."""
    from embedder.cli import evaluate_command
    from embedder.evaluation.evaluate import EvaluationOptions

    run = load_config(config, {"store": store, "model": model}, settings or ())
    options = EvaluationOptions(queries=queries, k=k, group=group, num_queries=num_queries)
    print_result(as_json, evaluate_command.evaluate(run, options, out, version))
