"""The command `embedder search`."""

from pathlib import Path
from typing import Annotated

import typer

from embedder.cli import search_commands
from embedder.cli.options import AsJson, ConfigFile, ModelUri, Settings, StoreUri, print_result
from embedder.config import load_config
from embedder.retrieval.options import SearchOptions


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(search)


def search(
    queries: Annotated[
        list[str] | None, typer.Argument(metavar="QUERY", help="What the pictures should show; several at once.")
    ] = None,
    store: StoreUri = None,
    k: Annotated[int, typer.Option("-k", min=1, help="How many to find for each query.")] = 10,
    where: Annotated[str | None, typer.Option(metavar="SQL", help="Only rows that fulfil it: 'price < 10'.")] = None,
    images: Annotated[
        list[Path] | None, typer.Option("--image", help="Search with a picture instead of a text; several at once.")
    ] = None,
    vector: Annotated[Path | None, typer.Option(help="Search with the vectors of a .npy file, (E,) or (Q, E).")] = None,
    hybrid: Annotated[bool, typer.Option("--hybrid", help="Rank by the words of captions, too.")] = False,
    fold: Annotated[
        float | None, typer.Option(metavar="COSINE", help="Fold hits this near to a better one: 0.98.")
    ] = None,
    min_score: Annotated[float | None, typer.Option(metavar="COSINE", help="Least score of a hit.")] = None,
    all_segments: Annotated[bool, typer.Option("--all-segments", help="A hit a segment, not a video.")] = False,
    sheet: Annotated[Path | None, typer.Option(help="Write the hits as a contact sheet (PNG).")] = None,
    version: Annotated[str | None, typer.Option(metavar="RUN_ID", help="As it was published by that run.")] = None,
    model: ModelUri = None,
    config: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Find pictures and videos that fit a text, a picture or a vector."""
    asked = search_commands.QueryArguments(queries or (), images or (), vector)
    options = SearchOptions(k=k, where=where, group=not all_segments, fold=fold, hybrid=hybrid, min_score=min_score)
    run = load_config(config, {"store": store, "model": model}, settings or ())
    print_result(as_json, search_commands.search(run, asked, options, sheet, version))
