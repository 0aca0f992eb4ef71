"""Error of servables, and one-line descriptions of errors."""

from embedder.errors import EmbedderError
from embedder.storage.printable import readable

MAX_CHARACTERS = 300  # of an error in one line


class ServableError(EmbedderError):
    """Servable that can't be used as declared because of its file, framework, outputs or place among the others."""


def one_line(error: BaseException) -> str:
    """Return an error's type and message in one line, as `shorten_line`."""
    return shorten_line(f"{type(error).__name__}: {error}")


def shorten_line(text: str) -> str:
    """Return the text in one line of UTF-8; a long one keeps both ends, as some libraries name an error's cause last.

    Errors quote names of files, which need not be UTF-8, and tables hold nothing else.
    """
    line = " ".join(readable(text).split())
    end = MAX_CHARACTERS // 2
    return line if len(line) <= MAX_CHARACTERS else f"{line[: end - 3]}...{line[-end:]}"
