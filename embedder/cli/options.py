"""Options that all commands share, and how a result is printed."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from embedder.cli.commands import Result
from embedder.cli.terminal import Terminal

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
        sys.stdout.write(json_line(result.data))
        return
    # Into a file or a pipe, tables are not folded to the width of a screen.
    console = Terminal(width=None if sys.stdout.isatty() else 250)
    for part in result.shown:
        console.print(part, soft_wrap=True)


def json_line(data: dict[str, Any]) -> str:
    """One line of ASCII without a control character, from which every string comes back as it was."""
    # JSON may leave DEL as it is, and `json.dumps` does.
    return json.dumps(data, default=_plain).replace("\x7f", r"\u007f") + "\n"


def _plain(value: Any) -> Any:
    """What JSON does not know: times and paths as text."""
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
