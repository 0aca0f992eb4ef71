"""Cures of wrong values: what to write instead."""

import shlex
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from embedder.config_toml.key_types import KeyType
from embedder.config_toml.units import MEASURES, SHARE, number_in
from embedder.config_toml.values import (
    Path,
    dotted_key,
    format_value,
    heading,
    toml,
    toml_key,
    type_name,
    without_secrets,
)

GIB = 1 << 30
SYNONYMS = {
    "fp32": "float32",
    "float": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "gpu": "cuda",
    "folder": "files",
    "parquet": "table",
    "csv": "table",
    "tar": "webdataset",
    "none": "auto",
}
"""Other words for values that are chosen from a few."""

TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
MIN_CHARACTERS = 3  # a shorter word is close to anything
ENTRY_KEYS = ("path",)
"""Keys that a text means where a table is asked for: `source = "photos"`."""


def close_to(word: str, known: Collection[str]) -> str | None:
    """Known word that another was probably meant to be; None for none."""
    lower = {each.lower(): each for each in known}
    close = get_close_matches(word.lower(), lower, n=1, cutoff=0.6) if len(word) >= MIN_CHARACTERS else []
    return lower[close[0]] if close else None


def example(taken: KeyType) -> str:
    """Value of a type, for a key that is missing."""
    if taken.items or taken.is_range:
        return "[...]"
    return '"..."' if str in taken.scalars else "..."


def wrong_type(path: Path, taken: KeyType, value: Any, unit: str) -> tuple[str, str | None]:
    """Say that a value is of a type that its key doesn't take.

    Args:
        path: of the value.
        taken: what the key takes.
        value: as found.
        unit: of the key; empty for none.

    Returns:
        What was found and the rule; and what to write in place of the value, as TOML, where that can be told.
    """
    is_item = isinstance(path[-1], int)
    is_list = taken.is_list_of_tables and (not taken.scalars or isinstance(value, Mapping))
    if is_list or (taken.is_table and not taken.values and (is_item or not isinstance(value, str))):
        return _wrong_table(path, taken, value), None
    key = next(part for part in reversed(path) if isinstance(part, str))
    found = f"{dotted_key(path)} = {format_value(path, value)}"
    rule = f"takes {taken.with_article}{_in_unit(unit) if taken.scalars & {int, float} else ''}"
    if taken.is_table and not (isinstance(value, str) and close_to(value, list(map(str, taken.values)))):
        return f"{found}: found {type_name(value)}; {rule}: {_as_table(path, taken)}", None
    if isinstance(value, str) and taken.values and not (taken.scalars and _number(taken, value, unit) is not None):
        texts = [each for each in taken.values if isinstance(each, str)]
        synonym = SYNONYMS.get(value.lower())
        meant = synonym if synonym in texts else close_to(value, texts)
        return f"{found}: {rule}" + (f"; did you mean {toml(meant)}?" if meant else ""), None
    instead = _instead(taken, value, unit, key)
    if is_item:  # it has no key of its own
        cure = f": write {instead}" if instead else ""
        return f"{found}: found {type_name(value)} in the list; each item {rule}{cure}", None
    if key in ENTRY_KEYS and isinstance(value, list | tuple) and len(path) > 1:
        return f"{found}: found {type_name(value)}; {key} {rule}: write one {heading(path[:-1])} for each", None
    return f"{found}: found {type_name(value)}; {key} {rule}", instead


def _in_unit(unit: str) -> str:
    return ", a share (5 % is 0.05)" if unit == SHARE else f", in {unit}" if unit in MEASURES else ""


def _instead(taken: KeyType, value: Any, unit: str, key: str) -> str | None:
    """Value to write in place of one of another type; None where none can be told."""
    if isinstance(value, str):
        return _instead_of_text(taken, value, unit, key)
    if bool in taken.scalars and value in (0, 1):
        return toml(bool(value))
    if str in taken.scalars and isinstance(value, int | float):
        return f'"{toml(value)}"'
    if int in taken.scalars and isinstance(value, float) and abs(value) < 2**53:
        return f"{int(value)} or {int(value) + 1}"
    return None


def _instead_of_text(taken: KeyType, value: str, unit: str, key: str) -> str | None:
    if taken.items is not None and str in taken.items.scalars:
        is_command = key == "command" and not value.startswith("[")
        return toml(without_secrets((key,), shlex_split(value) if is_command else _split(value)))
    if bool in taken.scalars:
        word = value.strip().lower()
        return "true" if word in TRUE else "false" if word in FALSE else None
    number = _number(taken, value, unit)
    return None if number is None else toml(number)


def _number(taken: KeyType, value: str, unit: str) -> int | float | None:
    if not taken.scalars & {int, float}:
        return None
    return number_in(value, unit, is_integer=float not in taken.scalars)


def shlex_split(command: str) -> list[str]:
    """Split a command as a shell does; where its quotes don't close, at its spaces."""
    try:
        return shlex.split(command)
    except ValueError:
        return command.split()


def _split(value: str) -> list[str]:
    """Items that one text probably lists: names with commas between them, but no pattern such as `*.{jpg,png}`."""
    if value.startswith("["):  # a list without quotes, as `--set` may have it
        value = value.strip("[] ")
    is_list = "," in value and not set(value) & set("{[*")
    return [part.strip() for part in value.split(",") if part.strip()] if is_list else [value]


def _wrong_table(path: Path, taken: KeyType, value: Any) -> str:
    """Say that a table, or a list of tables, is written as something else."""
    keys = tuple(part for part in path if isinstance(part, str))
    name = ".".join(map(toml_key, keys))
    if taken.is_list_of_tables and isinstance(value, Mapping):
        return f"[{name}]: each is an entry of a list: write [[{name}]], in double brackets"
    if taken.is_list_of_tables:
        entry = _entry(taken.items.tables[0].model_fields, value) if taken.items else ""
        return f"{name} = {format_value(path, value)}: found {type_name(value)}; write [[{name}]]{entry}"
    is_tables = isinstance(value, Sequence) and value and all(isinstance(each, Mapping) for each in value)
    if is_tables and not isinstance(path[-1], int):
        return f"[[{name}]]: there is one, no list: write [{name}], in single brackets"
    if isinstance(path[-1], int):
        entry = _entry(taken.tables[0].model_fields, value)
        return f"{name} = [{format_value(path, value)}]: found {type_name(value)} in the list; write [[{name}]]{entry}"
    return f"{name} = {format_value(path, value)}: found {type_name(value)}; takes a table: {_as_table(path, taken)}"


def _as_table(path: Path, taken: KeyType) -> str:
    """Header of a table and its first keys."""
    name = heading(tuple(part for part in path if isinstance(part, str)))
    if taken.entries is not None:
        return f"write {name}, and below it one key for each"
    keys = list(taken.tables[0].model_fields)
    some = ", ".join(keys[:4]) + (", ..." if len(keys) > 4 else "")
    return f"write {name}, and its keys below it ({some})"


def _entry(keys: Collection[str], value: Any) -> str:
    """How an entry of a list of tables goes on, where the value that was found is one of its keys."""
    key = next((key for key in ENTRY_KEYS if key in keys), None)
    first = value[0] if isinstance(value, list | tuple) and value else value
    if key is None or not isinstance(first, str):
        return ", and its keys below it"
    each = ", one for each," if isinstance(value, list | tuple) and len(value) > 1 else ","
    return f"{each} and below it {key} = {format_value((key,), first)}"


def out_of_bounds(value: Any, bounds: Sequence[tuple[str, float]], unit: str) -> tuple[str, str | None]:
    """Say within which bounds a number must be.

    Args:
        value: as found.
        bounds: in words, as ("at least", 1).
        unit: of the key; empty for none.

    Returns:
        The rule; and what to write in place of the value, as TOML, where that can be told.
    """
    said = " and ".join(f"{words} {_format_bound(bound)}" for words, bound in bounds)
    text = f"must be {said}{f' {unit}' if unit in MEASURES else ''}"
    low = next((bound for words, bound in bounds if words in ("at least", "more than")), 0)
    high = next((bound for words, bound in bounds if words in ("at most", "less than")), None)
    if unit == "bytes" and 0 < value < low and (meant := value * GIB) >= low:
        return f"{text}; {value:g} GiB are {toml(int(meant))}", toml(int(meant))
    if high == 1 and 1 < value <= 100:
        return f"{text}, a share; {value:g} % is {value / 100:g}", f"{value / 100:g}"
    return text, None


def _format_bound(bound: float) -> str:
    return toml(bound) if isinstance(bound, int) else f"{bound:g}"
