"""Reads a TOML file; names whatever else a path may lead to, and finds the line of each key."""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

from embedder.config_toml import values
from embedder.errors import ConfigError

MAX_BYTES = 1 << 20
MAX_CHARACTERS = 1 << 16  # longer files have no line numbers
MAX_STATEMENT_LINES = 100  # most that are tried as the end of a statement
SUFFIX = ".toml"

_OTHER_FORMATS = {"JSON": r'\s*(\{|\[\s*[{"])', "XML or HTML": r"\s*<", "YAML": r"(#.*\n|\s)*(---|[\w.-]+:(\s|$))"}
_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")
_CURES = {
    "Invalid value": 'a text stands in quotes, a number without unit; true and false are small; write key = "text"',
    "Cannot overwrite a value": "the key stands twice; keep one of the two",
    "Cannot declare": "the table stands twice; write [[name]] where it is a list, as [[source]], else keep one",
    "Expected '=' after a key": "write key = value; a key is one word, and a comment begins with #",
    "Expected newline": "each key has its own line, and a text one pair of quotes",
    "Unescaped '\\'": "write a text with backslashes in single quotes ('C:\\photos')",
    "Invalid hex value": "write a text with backslashes in single quotes ('C:\\photos')",
    "Illegal character": 'write a text of one line in quotes, "...", of several in """..."""',
    "Unterminated string": "write a quote at the end of the text",
    "Unclosed array": "write ] at the end of the list, and commas between its items",
    "Expected ']'": "write [name], or [[name]] for a list; a name is one word",
}
"""The fix, by the beginning of the message of Python's parser."""


@dataclass(frozen=True)
class ConfigFile:
    """A configuration file as read: its text, and the same parsed (`tree`)."""

    path: Path
    text: str
    tree: dict[str, Any]

    @cached_property
    def lines(self) -> dict[values.Path, int]:
        """Line of each key, from 1."""
        return line_index(self.text)


def read_file(path: Path) -> ConfigFile:
    """Read a TOML file; raises `ConfigError` if it is missing, unreadable, or isn't TOML."""
    content = _bytes(path).removeprefix(b"\xef\xbb\xbf")  # the byte order mark of UTF-8
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}, line {line}: the byte {content[error.start]:#04x} is no UTF-8; give a TOML file, saved as UTF-8"
        ) from None
    try:
        return ConfigFile(path, text, parse(text))
    except ValueError as error:
        if other := next((name for name, begin in _OTHER_FORMATS.items() if re.match(begin, text)), None):
            raise ConfigError(
                f"{path}: this is {other}; write the configuration as TOML, in lines of key = value"
            ) from None
        raise ConfigError(f"{path}{explain_syntax(text, str(error))}") from None


def parse(text: str) -> dict[str, Any]:
    """Parse TOML; the message of its `ValueError` ends with line and column, if known."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except (RecursionError, ValueError):  # ValueError: of Python's integers
        raise ValueError("lists within each other, hundreds deep, or a number of thousands of digits") from None


def explain_syntax(text: str, message: str) -> str:
    """Explain in one line, to follow the file's name, where a text isn't TOML, and the fix.

    The message of Python's parser ends with line and column. No line of the text is quoted, as it may hold a secret.
    """
    place = _PLACE.search(message)
    said = message[: place.start()] if place else message
    where = (
        f"line {place[1]}, column {place[2]}"
        if place and place[1]
        else f"line {max(1, len(text.rstrip().splitlines()))}"
    )
    cure = next((cure for begin, cure in _CURES.items() if said.startswith(begin)), "correct this line")
    return f", {where}: this is no TOML ({said[:1].lower()}{said[1:]}); {cure}"


def line_index(text: str) -> dict[values.Path, int]:
    """Find the line (from 1) of each table, key and list entry, which Python's parser doesn't report.

    A value of several lines has its first one. Paths that aren't found are left out.
    """
    lines: dict[values.Path, int] = {}
    lengths: dict[values.Path, int] = {}  # of lists of tables, so far
    table: values.Path = ()
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
    """Split a file into headers and assignments, each with its first line.

    A statement ends with the first line that makes it valid: a value of several lines isn't valid before its last one.
    A statement that never becomes valid ends the search and is left out; in a very long file everything is.
    """
    lines = text.replace("\r\n", "\n").split("\n") if len(text) <= MAX_CHARACTERS else []
    first = 0
    while first < len(lines):
        for last in range(first, min(len(lines), first + MAX_STATEMENT_LINES)):
            statement = "\n".join(lines[first : last + 1])
            if _is_valid(statement):
                break
        else:
            return
        if statement.strip() and not statement.lstrip().startswith("#"):
            yield first + 1, statement
        first = last + 1


def _is_valid(text: str) -> bool:
    try:
        parse(text)
    except ValueError:
        return False
    return True


def _header(tree: dict[str, Any], lengths: dict[values.Path, int]) -> values.Path:
    """Return the path of the table that a header begins; counts it if it is an entry of a list."""
    path: values.Path = ()
    value: Any = tree
    while isinstance(value, dict) and value:
        ((key, value),) = value.items()
        path = (*path, key)
        if isinstance(value, list):
            lengths[path] = lengths.get(path, 0) + 1
        if path in lengths:
            path = (*path, lengths[path] - 1)
    return path


def _paths(value: Any) -> Iterator[values.Path]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield (key,)
        for path in _paths(inner):
            yield (key, *path)


def _bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file{_near(path)}; give the path of a TOML file") from None
    except IsADirectoryError:
        names = ", ".join(sorted(each.name for each in path.glob(f"*{SUFFIX}"))[:3])
        raise ConfigError(
            f"{path}: this is a folder{names and f' with {names}'}; give the path of a TOML file"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        problem = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ConfigError(f"{path}: can't be read ({problem}); give the path of a TOML file") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{path}: more than {MAX_BYTES >> 20} MiB, which is no configuration; give a TOML file")
    return content


def _near(path: Path) -> str:
    if not path.parent.exists():
        return f", and no folder {path.parent}"
    names = [each.name for each in path.parent.glob(f"*{SUFFIX}")]
    close = get_close_matches(path.name, names, n=1) or [name for name in names if name == path.name + SUFFIX]
    return f" (did you mean {path.parent / close[0]}?)" if close else ""
