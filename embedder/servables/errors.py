"""Error of servables."""

from embedder.errors import EmbedderError


class ServableError(EmbedderError):
    """Servable that can't be used as declared: its file, its framework, its outputs, or its place among others."""


def one_line(error: BaseException, limit: int = 300) -> str:
    """Type and message of an error in one line.

    Args:
        error: the error.
        limit: most characters; of a longer one both ends stay: some libraries say the cause last.
    """
    return shorten_line(f"{type(error).__name__}: {error}", limit)


def shorten_line(text: str, limit: int = 300) -> str:
    """Text in one line, without its middle where it is longer than the limit."""
    line = " ".join(text.split())
    if len(line) <= limit:
        return line
    end = limit // 2
    return f"{line[: limit - end - 3]}...{line[-end:]}"
