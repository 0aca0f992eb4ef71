"""Error of servables, and one-line descriptions of errors."""

from embedder.errors import EmbedderError


class ServableError(EmbedderError):
    """Servable that can't be used as declared because of its file, framework, outputs or place among the others."""


def one_line(error: BaseException, limit: int = 300) -> str:
    """Return an error's type and message in one line of at most `limit` characters.

    A longer one keeps both ends: some libraries name the cause last.
    """
    return shorten_line(f"{type(error).__name__}: {error}", limit)


def shorten_line(text: str, limit: int = 300) -> str:
    """Return the text in one line, without its middle where it exceeds the limit."""
    line = " ".join(text.split())
    if len(line) <= limit:
        return line
    end = limit // 2
    return f"{line[: limit - end - 3]}...{line[-end:]}"
