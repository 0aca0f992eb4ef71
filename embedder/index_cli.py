"""The commands that look after a store's index."""

from typing import Annotated

import typer

from embedder import index_commands
from embedder.cli_options import AsJson, ConfigFile, Settings, StoreUri, print_result
from embedder.config import load_config

Number = Annotated[
    int | None, typer.Option("--to", min=1, help="Version of `embedder index status`; else the one before.")
]


def build(
    store: StoreUri = None,
    kind: Annotated[str, typer.Option(help="auto, flat, hnsw or ivf.")] = "auto",
    config: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Build an index of the published embeddings, and publish it with them."""
    print_result(as_json, index_commands.build(load_config(config, {"store": store}, settings or ()), kind))


def status(
    store: StoreUri = None, config: ConfigFile = None, settings: Settings = None, as_json: AsJson = False
) -> None:
    """List the versions of the index, and which one is published."""
    print_result(as_json, index_commands.status(load_config(config, {"store": store}, settings or ())))


def rollback(
    store: StoreUri = None,
    number: Number = None,
    config: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Publish an earlier index of the same rows again."""
    print_result(as_json, index_commands.rollback(load_config(config, {"store": store}, settings or ()), number))


def add_to(app: typer.Typer) -> None:
    """Make these commands of the application, under `index`."""
    index = typer.Typer(no_args_is_help=True, help="Build an index, see its versions, go back to one.")
    for command in (build, status, rollback):
        index.command()(command)
    app.add_typer(index, name="index")
