"""The commands that look after a store's index."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from embedder.cli import index_commands
from embedder.cli.options import AsJson, ConfigFile, Settings, StoreUri, print_result
from embedder.config import RunConfig, load_config
from embedder.planning.options import parse_size

Kind = Annotated[str | None, typer.Option(help="auto, flat, hnsw, ivf, or a design that `status` shows.")]
Memory = Annotated[str | None, typer.Option(help="The most that the index may take in memory, as 2GiB.")]
Latency = Annotated[float | None, typer.Option("--latency-ms", help="The most that one query may take on one thread.")]
Recall = Annotated[float | None, typer.Option(help="Of the exact ten nearest, the share that it shall find.")]
Explain = Annotated[bool, typer.Option("--explain", help="Measure all designs, and show what was chosen from.")]
Force = Annotated[bool, typer.Option("--force", help="Publish it though it finds less than the last; the floor stays.")]
Number = Annotated[int | None, typer.Option("--to", min=1, help="Version that `status` shows; else the one before.")]
NO_WISHES: Mapping[str, object] = {}


def build(
    store: StoreUri = None,
    kind: Kind = None,
    memory: Memory = None,
    latency_ms: Latency = None,
    recall: Recall = None,
    explain: Explain = False,
    force: Force = False,
    config: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Build an index of the published embeddings, and publish it with them if it is good enough."""
    wishes = {"kind": kind, "memory_bytes": parse_size("--memory", memory), "latency_ms": latency_ms, "recall": recall}
    run = _configured(config, store, settings, wishes)
    print_result(as_json, index_commands.build(run, explain=explain, force=force))


def update(
    store: StoreUri = None, config: ConfigFile = None, settings: Settings = None, as_json: AsJson = False
) -> None:
    """Bring the index up to the published embeddings: add what is new, mask what is gone."""
    print_result(as_json, index_commands.update(_configured(config, store, settings)))


def status(
    store: StoreUri = None, config: ConfigFile = None, settings: Settings = None, as_json: AsJson = False
) -> None:
    """List the versions of the index, and which one is published."""
    print_result(as_json, index_commands.status(_configured(config, store, settings)))


def rollback(
    store: StoreUri = None,
    number: Number = None,
    config: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Publish an earlier index of the same rows again."""
    print_result(as_json, index_commands.rollback(_configured(config, store, settings), number))


def add_to(app: typer.Typer) -> None:
    """Make these commands of the application, under `index`."""
    index = typer.Typer(no_args_is_help=True, help="Build an index, see its versions, go back to one.")
    for command in (build, update, status, rollback):
        index.command()(command)
    app.add_typer(index, name="index")


def _configured(
    config: Path | None, store: str | None, settings: list[str] | None, wishes: Mapping[str, object] = NO_WISHES
) -> RunConfig:
    """The configuration, in which options count more than the file, and `--set` more than options."""
    options = [f"index.{key}={value}" for key, value in wishes.items() if value is not None]
    return load_config(config, {"store": store}, [*options, *(settings or ())])
