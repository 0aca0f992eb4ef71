"""The terminal: a console that shows text of files as it is; messages and progress on standard error."""

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from embedder.observability.redaction import mask
from embedder.storage.printable import printable

MAX_LINE_CHARACTERS = 4_000
MAX_CELL_CHARACTERS = 500

# Of a piece that is laid out already: tables are made of lines.
_DANGEROUS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class Terminal(Console):
    """Console for text from outside: names, captions, messages.

    Strings are literal, without markup and emoji codes; control characters in them are escapes, and long ones are
    shortened. Callers escape nothing.
    """

    def __init__(self, *, stderr: bool = False, width: int | None = None) -> None:
        super().__init__(stderr=stderr, width=width, highlight=False, markup=False, emoji=False, force_jupyter=False)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print lines and tables; a string is one line."""
        lines = (Text(printable(each, MAX_LINE_CHARACTERS)) if isinstance(each, str) else each for each in objects)
        super().print(*lines, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Lay out a string within a table."""
        return super().render_str(printable(text, MAX_CELL_CHARACTERS), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Lay anything out; text that is no string controls the terminal as little."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else _DANGEROUS.sub(lambda found: printable(found[0]), segment.text)
            yield Segment(text, segment.style, segment.control)


@cache
def error_terminal() -> Terminal:
    """Console of standard error; one, so that messages stand above a bar that is drawn."""
    return Terminal(stderr=True)


class TerminalLog(logging.Handler):
    """Handler that prints messages on standard error; secrets are masked."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line."""
        error_terminal().print(mask(record.getMessage()), style="dim", soft_wrap=True)


@contextmanager
def progress_bar(total: int, description: str, num_done: int = 0) -> Iterator[Callable[[int, str, str], None]]:
    """Draw a bar on standard error, where that is a terminal.

    Args:
        total: number at the end; 0 where it is not known.
        description: text beside it at first.
        num_done: number at first.

    Yields:
        Function that takes the number done, the text and the rate.
    """
    from rich import progress

    columns = (
        progress.SpinnerColumn(),
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[rate]}"),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=error_terminal(), transient=True) as bar:
        task = bar.add_task(description, total=total or None, completed=num_done, rate="")
        yield lambda done, text, rate: bar.update(task, completed=done, description=text, rate=rate)


@contextmanager
def item_bar(num_items: int) -> Iterator[Callable[[int], None]]:
    """Draw a bar over `num_items` items; yields the function that takes the number done."""
    started_s = time.monotonic()
    with progress_bar(num_items, "starting") as update:

        def on_progress(num_done: int) -> None:
            seconds = time.monotonic() - started_s
            update(num_done, "embedding", f"{num_done / seconds:.0f} items/s" if seconds else "")

        yield on_progress
