"""The terminal: a console that shows text from files literally; messages and progress on standard error."""

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from embedder.redaction import mask
from embedder.storage.printable import printable

if TYPE_CHECKING:
    from embedder.executors.bottleneck import OperatorView

MAX_LINE_CHARACTERS = 4_000
MAX_CELL_CHARACTERS = 500

# A piece that is laid out already: tables consist of lines.
_DANGEROUS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class Terminal(Console):
    """Console for text from outside: names, captions, messages.

    Strings are literal, without markup and emoji codes; their control characters are escaped, and long ones shortened.
    Callers need not escape anything.
    """

    def __init__(self, *, stderr: bool = False, width: int | None = None) -> None:
        super().__init__(stderr=stderr, width=width, highlight=False, markup=False, emoji=False, force_jupyter=False)

    def on_broken_pipe(self) -> None:
        """Show no more messages where who read them is gone; who no longer reads a result ends the command."""
        if self.stderr:
            self.quiet = True
        else:
            super().on_broken_pipe()

    def print(self, *objects: Any, **options: Any) -> None:
        """Print lines and tables; a string is one line."""
        lines = (Text(printable(each, MAX_LINE_CHARACTERS)) if isinstance(each, str) else each for each in objects)
        super().print(*lines, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Lay out a string within a table."""
        return super().render_str(printable(text, MAX_CELL_CHARACTERS), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Lay out anything; text in other objects than strings can't control the terminal either."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else _DANGEROUS.sub(lambda found: printable(found[0]), segment.text)
            yield Segment(text, segment.style, segment.control)


@cache
def error_terminal() -> Terminal:
    """Return the one console of standard error, so that messages appear above a progress bar."""
    return Terminal(stderr=True)


class TerminalLog(logging.Handler):
    """Handler that prints messages on standard error; secrets are masked."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line; a terminal that is gone ends no run."""
        with suppress(OSError):
            error_terminal().print(mask(record.getMessage()), style="dim", soft_wrap=True)


@contextmanager
def bar_with_lines(
    total: int, description: str, num_done: int = 0
) -> Iterator[tuple[Callable[[int, str, str], None], Callable[[RenderableType], None]]]:
    """Draw a bar on standard error, if that is a terminal, with room for something below it.

    `total` is the number at the end, 0 if unknown; `description` and `num_done` are the initial text and number. Yields
    a function that takes the number done, the text and the rate, and one that takes what is shown below the bar.
    """
    from rich import progress

    below: list[RenderableType] = []

    class BarWithLines(progress.Progress):
        def get_renderables(self) -> Iterable[RenderableType]:
            yield from super().get_renderables()
            yield from below

    columns = (
        progress.SpinnerColumn(),
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[rate]}"),
        progress.TimeRemainingColumn(),
    )
    with BarWithLines(*columns, console=error_terminal(), transient=True) as bar:
        task = bar.add_task(description, total=total or None, completed=num_done, rate="")

        def update(done: int, text: str, rate: str) -> None:
            bar.update(task, completed=done, description=text, rate=rate)

        def show_below(shown: RenderableType) -> None:
            below[:] = [shown]

        yield update, show_below


class ItemBar:
    """Bar over the items of a run, and a line for each operator below it; an `OperatorDisplay`."""

    def __init__(self, update: Callable[[int, str, str], None], show_below: Callable[[RenderableType], None]) -> None:
        """Start the clock; the functions come from `bar_with_lines`."""
        self._update, self._show_below = update, show_below
        self._started_s = time.monotonic()

    def __call__(self, num_done: int) -> None:
        """Show the number of finished items."""
        seconds = time.monotonic() - self._started_s
        self._update(num_done, "embedding", f"{num_done / seconds:.0f} items/s" if seconds else "")

    def show_operators(self, view: "OperatorView") -> None:
        """Show the operators, and mark the bottleneck."""
        self._show_below(operator_lines(view))


def operator_lines(view: "OperatorView") -> Text:
    """Lay out the lines of a run's operators and their headings; only once, as a bar is drawn ten times per second."""
    from embedder.executors.bottleneck import OPERATOR_COLUMNS, operator_cells

    rows = [("", *OPERATOR_COLUMNS), *((state.name, *operator_cells(state)) for state in view.operators)]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = Text(no_wrap=True, overflow="crop")
    for name, *cells in rows:
        line = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        is_bottleneck = name and name == view.bottleneck
        mark, style = ("  bottleneck", "bold") if is_bottleneck else ("", "dim")
        lines.append(f"{name.ljust(widths[0])}  {line}{mark}\n", style)
    lines.rstrip()
    return lines


@contextmanager
def item_bar(num_items: int) -> Iterator[ItemBar]:
    """Draw a bar over `num_items` items; yields what takes the number done, and the operators."""
    with bar_with_lines(num_items, "starting") as (update, show_below):
        yield ItemBar(update, show_below)
