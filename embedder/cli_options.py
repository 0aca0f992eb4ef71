"""Options that all commands share, and how a result is printed."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from embedder.commands import Result

ConfigFile = Annotated[Path | None, typer.Option("--config", help="TOML file that describes the run.")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set any key of it.")]
AsJson = Annotated[bool, typer.Option("--json", help="The last line of standard output is one JSON document.")]
StoreUri = Annotated[str | None, typer.Option("--store", help="Folder that holds the results.")]
Force = Annotated[
    list[str] | None, typer.Option("--force", metavar="GUARD", help="Publish although this guard fails; repeatable.")
]
ModelUri = Annotated[str | None, typer.Option("--model", help="Model folder: local, s3:// or hub id.")]


def print_result(as_json: bool, result: Result) -> None:
    """Print the result for a person, or as one line of JSON."""
    if as_json:
        sys.stdout.write(json.dumps(result.data, default=_plain) + "\n")
        return
    # Into a file or a pipe, tables are not folded to the width of a screen.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 250)
    for part in result.shown:
        console.print(part, soft_wrap=True)


def _plain(value: Any) -> Any:
    """What JSON does not know: times and paths as text."""
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
