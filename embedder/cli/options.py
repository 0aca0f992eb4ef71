"""Options that commands share, and the configuration that they make."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from embedder.errors import ConfigError

ConfigFile = Annotated[Path | None, typer.Option("--config", help="TOML file that describes the run.")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set any key of it.")]
AsJson = Annotated[bool, typer.Option("--json", help="The last line of standard output is one JSON document.")]
StoreUri = Annotated[str | None, typer.Option("--store", help="Folder that holds the results.")]
ModelUri = Annotated[str | None, typer.Option("--model", help="Model folder: local, s3:// or hub id.")]
ModelFolder = Annotated[Path, typer.Option("--out", help="The model folder to make.")]
NumStages = Annotated[int | None, typer.Option("--stages", help="Shards that the model is cut into.")]
PlanFile = Annotated[str | None, typer.Option("--plan", help="Plan file made by `embedder plan --out`.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="float32, bfloat16, float16 or int8.")]
PublishedBy = Annotated[
    str | None, typer.Option("--version", metavar="RUN_ID", help="As it was published by that run.")
]
RetryRejects = Annotated[
    bool, typer.Option("--retry-rejects/--no-retry-rejects", help="Embed again what was rejected before.")
]
Force = Annotated[
    list[str] | None, typer.Option("--force", metavar="GUARD", help="Publish although this guard fails; repeatable.")
]


def source_override(
    path: str | None,
    kind: str | None = None,
    columns: Mapping[str, str | None] | None = None,
    carryover: list[str] | None = None,
    patterns: Mapping[str, list[str]] | None = None,
) -> list[dict[str, Any]] | None:
    """The one source that the command line describes, as the configuration file would.

    Args:
        path: path or URI of the source; None for the sources of the file.
        kind: kind of the source, as `files`.
        columns: names of a table's columns by what they hold: `id`, `image`, `caption`.
        carryover: columns to copy.
        patterns: `include` and `exclude`.

    Raises:
        ConfigError: options describe a source that is not given.
    """
    named = {name: column for name, column in (columns or {}).items() if column is not None}
    if path is None:
        if kind or named or carryover or any((patterns or {}).values()):
            raise ConfigError(
                "--kind, the column options, --include and --exclude describe SOURCE; give SOURCE, or use the file's "
                "[[source]]"
            )
        return None
    source: dict[str, Any] = {"path": path, "columns": named, "carryover": carryover or [], **(patterns or {})}
    return [source | ({"kind": kind} if kind else {})]
