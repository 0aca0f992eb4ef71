"""Result of a command, printed for a person or as one line of JSON."""

import json
import sys
from dataclasses import dataclass, field
from typing import Any

from rich.console import RenderableType

from embedder.cli.terminal import Terminal

PIPE_WIDTH = 250  # characters; into a file or a pipe, tables are not folded to the width of a screen


@dataclass(frozen=True)
class Result:
    """Output of a command: `data` for `--json`, `shown` for the terminal."""

    data: dict[str, Any]
    shown: list[RenderableType] = field(default_factory=list)


def print_result(as_json: bool, result: Result) -> None:
    """Print the result for a person, or as one line of JSON."""
    if as_json:
        sys.stdout.write(json_line(result.data))
        return
    console = Terminal(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    for part in result.shown:
        console.print(part, soft_wrap=True)


def json_line(data: dict[str, Any]) -> str:
    """One line of ASCII without a control character, from which every string comes back as it was."""
    # JSON may leave DEL as it is, and `json.dumps` does.
    return json.dumps(data, default=_plain).replace("\x7f", r"\u007f") + "\n"


def _plain(value: Any) -> Any:
    """Text of a value that JSON has no type for: a time or a path."""
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
