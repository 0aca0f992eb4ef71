"""The one console that commands print to: it styles what is ours, and shows what came from files as it is."""

import re
from collections.abc import Iterable
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
    """A console for text that nobody has looked at: names, captions, messages.

    Strings are literal, without markup and emoji codes; control characters in them are escapes, and long ones are
    shortened. Nothing needs to be escaped by those who print.
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
        """Lay anything out; nothing that comes by another way than a string controls the terminal either."""
        for segment in super().render(renderable, options):
            is_safe = segment.control or not _DANGEROUS.search(segment.text)
            yield segment if is_safe else Segment(_DANGEROUS.sub(_shown, segment.text), segment.style)


def _shown(match: re.Match[str]) -> str:
    return printable(match[0])
