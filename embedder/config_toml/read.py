"""Reading of a TOML file; whatever else a path may lead to is named."""

import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

from embedder.config_toml import positions, values
from embedder.config_toml.syntax import explain_syntax, other_format
from embedder.errors import ConfigError

MAX_BYTES = 1 << 20
SUFFIX = ".toml"

# UTF-32's marks begin with those of UTF-16; editors of Windows write UTF-16 as "Unicode".
_MARKS = (
    (b"\xff\xfe\x00\x00", "UTF-32"),
    (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)


@dataclass(frozen=True)
class ConfigFile:
    """A configuration file as it was read.

    Attributes:
        path: of the file.
        text: what it holds.
        tree: the same, parsed.
    """

    path: Path
    text: str
    tree: dict[str, Any]

    @cached_property
    def lines(self) -> dict[values.Path, int]:
        """Line of each key, from 1."""
        return positions.line_index(self.text)


def read_file(path: Path, lists: Collection[str] = ()) -> ConfigFile:
    """Read a TOML file.

    Args:
        path: of the file.
        lists: names of tables that are written in double brackets, for the message.

    Raises:
        ConfigError: there is no such file, it can't be read, or it is no TOML.
    """
    text = _text(path, _bytes(path))
    try:
        return ConfigFile(path, text, parse(text))
    except ValueError as error:
        other = other_format(text)
        cure = f": this is {other}; write the configuration as TOML, in lines of key = value" if other else None
        raise ConfigError(f"{path}{cure or explain_syntax(text, str(error), lists)}") from None


def parse(text: str) -> dict[str, Any]:
    """Parse TOML.

    Raises:
        ValueError: it is none; the message ends with the line and the column, where they are known.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise ValueError("lists or tables within each other, hundreds deep") from None
    except ValueError:  # of Python's integers
        raise ValueError("a number of thousands of digits") from None


def _bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file{_near(path)}; give the path of a TOML file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: this is a folder{_in_folder(path)}; give the path of a TOML file") from None
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        problem = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ConfigError(f"{path}: can't be read ({problem}); give the path of a TOML file") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{path}: more than {MAX_BYTES >> 20} MiB, which is no configuration; give a TOML file")
    return content


def _text(path: Path, content: bytes) -> str:
    """Decode a file; a mark of UTF-8 at its begin is left out."""
    for mark, encoding in _MARKS:
        if content.startswith(mark):
            raise ConfigError(f"{path}: the file is encoded in {encoding}; save it as UTF-8")
    try:
        text = content.removeprefix(b"\xef\xbb\xbf").decode("utf-8")
    except UnicodeDecodeError as error:
        if b"\x00" in content:
            raise ConfigError(f"{path}: this is a binary file; give the path of a TOML file") from None
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}, line {line}: the byte {content[error.start]:#04x} is no UTF-8; save the file as UTF-8"
        ) from None
    if "\x00" in text:
        raise ConfigError(f"{path}: this is a binary file; give the path of a TOML file")
    return text


def _near(path: Path) -> str:
    """File beside a missing one whose name it probably was."""
    try:
        names = [each.name for each in path.parent.iterdir()]
    except OSError:
        return f", and no folder {path.parent}" if not path.parent.exists() else ""
    if path.name + SUFFIX in names:
        return f" (did you mean {path}{SUFFIX}?)"
    close = get_close_matches(path.name, [name for name in names if name.endswith(SUFFIX)], n=1)
    return f" (did you mean {path.parent / close[0]}?)" if close else ""


def _in_folder(path: Path) -> str:
    """TOML files of a folder that was given instead of one of them."""
    try:
        names = sorted(each.name for each in path.iterdir() if each.name.endswith(SUFFIX))
    except OSError:
        return ""
    return f" with {', '.join(names[:3])}{' and others' if len(names) > 3 else ''}" if names else ""
