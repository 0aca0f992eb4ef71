"""Patterns that choose files by name, read as in a `.gitignore`.

A pattern without a slash means a file or folder of that name at any depth; with one, a path from the source's root.
`*` and `?` stop at a slash, `**` crosses it, `{a,b}` and `[a-z]` choose; case is ignored. What lies below a folder that
matches, matches.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from embedder.errors import SourceError
from embedder.sources.globbing import expand_braces, glob_regex

_MAGIC = re.compile(r"[*?\[\]]")


@dataclass(frozen=True)
class NamePatterns:
    """Compiled patterns.

    Attributes:
        matcher: matches a path that one of them means, or that lies below a folder which one of them means.
        endings: literal ends of those that name a kind of file or one file, as `.pdf` of `*.pdf`.
    """

    matcher: re.Pattern[str]
    endings: tuple[str, ...]

    def match(self, path: str) -> bool:
        """Whether a path relative to the root is meant."""
        return self.matcher.match(path) is not None

    def name_kind(self, path: str) -> bool:
        """Whether a path that is meant is so by its kind or its whole name, not as one of everything in a folder."""
        return path.lower().endswith(self.endings) if self.endings else False


def compile_patterns(patterns: Sequence[str], where: str) -> NamePatterns | None:
    """Compile patterns; None where there are none.

    Args:
        patterns: as the configuration has them.
        where: their place, for messages.

    Raises:
        SourceError: one of them is empty, or can't be read.
    """
    plain = [each for pattern in patterns for each in expand_braces(pattern)]
    if not plain:
        return None
    for each in plain:
        if not each.strip("/"):
            raise SourceError(f'{where}: {each!r} names no file; write a pattern such as "*.tmp" or "private/**"')
    try:
        matcher = re.compile("|".join(_as_regex(each) for each in plain), re.IGNORECASE | re.DOTALL)
    except re.error as error:
        raise SourceError(f"{where}: {' '.join(patterns)} can't be read ({error}); correct its brackets") from None
    return NamePatterns(matcher, tuple(filter(None, map(_ending, plain))))


def _as_regex(pattern: str) -> str:
    inner = pattern.strip("/")
    is_path = "/" in pattern.rstrip("/")
    if inner.endswith("/**"):
        inner = inner[: -len("/**")]
        below = "/.*"
    else:
        below = "/.*" if pattern.endswith("/") else "(?:/.*)?"
    inner = ".*" if inner == "**" else glob_regex(inner).pattern.removesuffix(r"\Z")
    return ("" if is_path else "(?:.*/)?") + inner + below + r"\Z"


def _ending(pattern: str) -> str:
    """The literal end of a pattern's last part, where it names a kind of file (`.pdf`) or a whole name."""
    if pattern.endswith("/"):
        return ""
    last = pattern.rpartition("/")[2].lower()
    tail = _MAGIC.split(last)[-1]
    return tail if tail == last or "." in tail else ""
