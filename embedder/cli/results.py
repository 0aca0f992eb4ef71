"""Result of a command, printed for a person or as one line of JSON; tables in the style of all commands."""

import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from embedder.cli.terminal import Terminal
from embedder.errors import RunFailedError
from embedder.storage.printable import plain_json

PIPE_WIDTH = 250  # characters; in a file or a pipe, tables are not folded to a screen's width


@dataclass(frozen=True)
class Result:
    """Output of a command.

    `data` is for `--json`, `shown` for the terminal. `failure` says why the command exits with 1, empty if it doesn't.
    `afterwards` is called after printing, by a command that then continues.
    """

    data: dict[str, Any]
    shown: Sequence[RenderableType] = ()
    failure: str = ""
    afterwards: Callable[[], None] | None = None


def print_result(as_json: bool, result: Result) -> None:
    """Print the result for a person, or as one line of JSON; RunFailedError if that can't be written."""
    try:
        _write_result(as_json, result)
        sys.stdout.flush()
    except BrokenPipeError:  # of a reader who has seen enough
        raise
    except OSError as error:
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - else Python reports it again at its end
        raise RunFailedError(
            f"standard output can't be written ({error.strerror}); what the command did is done"
        ) from None


def _write_result(as_json: bool, result: Result) -> None:
    if as_json:
        sys.stdout.write(json_line(result.data))
        return
    console = Terminal(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    for part in result.shown:
        console.print(part, soft_wrap=True)


def json_line(data: dict[str, Any]) -> str:
    """Return one line of ASCII without control characters that preserves every string; NaN and infinity are null."""
    # JSON may leave DEL as it is, and `json.dumps` does.
    return json.dumps(plain_json(data)).replace("\x7f", r"\u007f") + "\n"


def new_table(*columns: str, left: Collection[str] | None = None, rows: Iterable[Sequence[str]] = ()) -> Table:
    """Make a table without lines, whose cells wrap.

    `left` has the headings of left-aligned columns, the others are right-aligned; None means all of them.
    """
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in columns:
        table.add_column(name, justify="left" if left is None or name in left else "right", overflow="fold")
    for cells in rows:
        table.add_row(*cells)
    return table
