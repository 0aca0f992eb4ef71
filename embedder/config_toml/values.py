"""Values in TOML's syntax and TOML's words; secrets in them are masked."""

import json
import re
from collections.abc import Mapping
from datetime import date, time
from typing import Any

from embedder.redaction import MASK, mask

Path = tuple[str | int, ...]
"""Keys from the top to a value, including indexes of list entries, from 0."""

MAX_SHOWN_CHARACTERS = 80
MAX_INTEGER = 2**63
GROUPED_FROM = 100_000  # larger integers are written in groups of three digits

_TYPE_NAMES: tuple[tuple[Any, str], ...] = (
    (bool, "a boolean"),
    (int, "an integer"),
    (float, "a number"),
    (str, "a string"),
    ((date, time), "a date or time"),
    ((list, tuple), "a list"),
    (Mapping, "a table"),
)
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_SECRET_OPTION = re.compile(r"(?i)--?[\w-]*(token|password|passwd|secret|credential|api-?key|access-?key)[\w-]*")
_FREE_TABLES = ("settings", "options")  # whose keys are another's, and may be called as a secret is
_SECRET_KEY = re.compile(
    r"(?i)(?!(.*_)?(bos|eos|pad|unk|sep|cls|mask|stop|start|end)_token$)"  # a tokeniser's
    r"(.*[_-])?(token|password|passwd|secret|credentials?|api[_-]?key|access[_-]?key)"
)
_WEBHOOK = re.compile(r"^((?:\w+://)?[^/?#]*).+", re.DOTALL)  # anyone who knows its path may post to it


def toml(value: Any) -> str:
    """Format a value on one line, as it stands after the equals sign."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{toml_key(key)} = {toml(each)}' for key, each in value.items())}}}"
    if isinstance(value, bool | date | time | float):
        return value.isoformat() if isinstance(value, date | time) else repr(value).lower()
    if isinstance(value, int):
        return f"{value:_}" if abs(value) >= GROUPED_FROM else str(value)
    # JSON may leave DEL as it is, TOML may not.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_key(key: str) -> str:
    """Format one key, quoted if it has characters other than letters, digits, `_` and `-`."""
    return key if _BARE_KEY.fullmatch(key) else toml(key)


def dotted_key(path: Path) -> str:
    """Format a path as `--set` takes it, without indexes of list entries."""
    return ".".join(toml_key(key) for key in path if isinstance(key, str))


def heading(path: Path) -> str:
    """Format the name of a table: `[decode]`, or `[[source]]` for an entry of a list."""
    return f"[[{dotted_key(path)}]]" if path and isinstance(path[-1], int) else f"[{dotted_key(path)}]"


def without_secrets(path: Path, value: Any) -> Any:
    """Mask secrets in a value: names and passwords in addresses, tokens, settings called so, and a webhook's path."""
    match value:
        case str() if path and path[-1] == "webhook":
            return mask(_WEBHOOK.sub(rf"\1/{MASK}", value))
        case str() if path[-2:-1] and path[-2] in _FREE_TABLES and _SECRET_KEY.fullmatch(str(path[-1])):
            return MASK
        case str():
            # A command's option is masked as within quotes if it starts the text.
            return mask(f'"{value}"')[1:-1]
        case list() | tuple():
            found = [without_secrets(path, each) for each in value]
            follows = [False, *(isinstance(each, str) and bool(_SECRET_OPTION.fullmatch(each)) for each in value)]
            return [MASK if is_secret else each for is_secret, each in zip(follows, found, strict=False)]
        case Mapping():
            return {key: without_secrets((*path, key), each) for key, each in value.items()}
    return value


def format_value(path: Path, value: Any) -> str:
    """Format a value for a message: masked, and shortened."""
    text = toml(without_secrets(path, value))
    return text if len(text) <= MAX_SHOWN_CHARACTERS else text[: MAX_SHOWN_CHARACTERS - 1] + "…"


def is_too_long(value: Any) -> bool:
    """Return whether a value is an integer with more bits than TOML's."""
    return isinstance(value, int) and abs(value) >= MAX_INTEGER


def type_name(value: Any) -> str:
    """Name the type of a value in TOML's words, with an article."""
    if is_too_long(value):
        return "an integer beyond 64 bits"
    return next((name for kinds, name in _TYPE_NAMES if isinstance(value, kinds)), f"a {type(value).__name__}")
