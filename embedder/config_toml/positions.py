"""Lines on which the keys of a TOML file stand, which Python's parser doesn't tell."""

import tomllib
from collections.abc import Iterator
from typing import Any

from embedder.config_toml.values import Path

MAX_STATEMENT_LINES = 100  # each line of a statement is tried as its end
MAX_CHARACTERS = 1 << 16  # longer files have no line numbers


def line_index(text: str) -> dict[Path, int]:
    """Find the line of each table, key and entry of a list.

    Args:
        text: a whole valid TOML file.

    Returns:
        Lines by path, from 1; a value of several lines has its first one. Paths that aren't found are left out.
    """
    lines: dict[Path, int] = {}
    lengths: dict[Path, int] = {}  # of lists of tables, so far
    table: Path = ()
    for line, statement in statements(text):
        tree = tomllib.loads(statement)
        if statement.lstrip().startswith("["):
            table = _header(tree, lengths)
            for depth in range(len(table)):
                lines.setdefault(table[: depth + 1], line)
        else:
            for path in _paths(tree):
                lines.setdefault((*table, *path), line)
    return lines


def statements(text: str) -> Iterator[tuple[int, str]]:
    """Split a file into headers and assignments, each with the line that it begins on.

    A statement ends with the first line that makes it valid: a value of several lines isn't valid before its last one.
    What doesn't become valid is the last, and is left out; of a very long file everything is.
    """
    if len(text) > MAX_CHARACTERS:
        return
    lines = text.replace("\r\n", "\n").split("\n")
    first = 0
    while first < len(lines):
        for last in range(first, min(len(lines), first + MAX_STATEMENT_LINES)):
            statement = "\n".join(lines[first : last + 1])
            if is_valid(statement):
                break
        else:
            return
        if statement.strip() and not statement.lstrip().startswith("#"):
            yield first + 1, statement
        first = last + 1


def is_valid(text: str) -> bool:
    """Whether a text is TOML."""
    try:
        tomllib.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _header(tree: dict[str, Any], lengths: dict[Path, int]) -> Path:
    """Path of the table that a header begins, which counts it where it is an entry of a list."""
    path: Path = ()
    value: Any = tree
    while isinstance(value, dict) and value:
        ((key, value),) = value.items()
        path = (*path, key)
        if isinstance(value, list):
            lengths[path] = lengths.get(path, 0) + 1
        if path in lengths:
            path = (*path, lengths[path] - 1)
    return path


def _paths(value: Any) -> Iterator[Path]:
    """Paths of all that is within a value."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield (key,)
        for path in _paths(inner):
            yield (key, *path)
