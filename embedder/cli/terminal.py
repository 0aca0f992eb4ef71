"""The terminal: a console that shows text of files as it is, and the progress of a run on standard error."""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

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
            is_safe = segment.control or not _DANGEROUS.search(segment.text)
            yield segment if is_safe else Segment(_DANGEROUS.sub(_shown, segment.text), segment.style)


def _shown(match: re.Match[str]) -> str:
    return printable(match[0])


class TerminalWatcher:
    """Messages and progress of a run on standard error; messages alone where that is no terminal."""

    def __init__(self) -> None:
        self.console = Terminal(stderr=True)

    def say(self, message: str) -> None:
        """Print one line."""
        self.console.print(message, style="dim", soft_wrap=True)

    @contextmanager
    def progress(self, num_items: int) -> Iterator[Callable[[int], None]]:
        """Draw a bar over `num_items` items; yields the function that takes the number done."""
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeRemainingColumn,
        )

        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console, transient=True) as bar:
            task = bar.add_task("starting", total=num_items or None, rate="")

            def on_progress(num_done: int) -> None:
                seconds = bar.tasks[0].elapsed or 0
                rate = f"{num_done / seconds:.0f} items/s" if seconds else ""
                bar.update(task, completed=num_done, description="embedding", rate=rate)

            yield on_progress
