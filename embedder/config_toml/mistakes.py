"""Mistakes in a configuration, each in one line of TOML's words: where, what was found, the rule, the cure.

Types, tables and names of keys are compared here with the fields of the configuration's classes; ranges, patterns and
combinations are checked by pydantic, whose words no line repeats.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from embedder.config_toml import hints
from embedder.config_toml.key_types import (
    KeyType,
    bounds_of,
    choose_table,
    family_of,
    key_type,
    rule_of_field,
    type_of,
    unit_of_field,
)
from embedder.config_toml.unknown_keys import keys_of_another_kind, unknown_key
from embedder.config_toml.values import Path, dotted_key, format_value, heading, toml, type_name
from embedder.errors import ConfigError

MAX_INTEGER = 2**63  # TOML's integers have 64 bits
MAX_LINES = 10

# Names and types are compared here; a default that depends on a wrong value is not computed.
_FOUND_BEFORE = {"extra_forbidden", "missing", "default_factory_not_called"}
_BROKEN_BOUNDS = {"greater_than_equal", "greater_than", "less_than_equal", "less_than"}
_RULES = {
    "finite_number": "must be a finite number; write one",
    "string_too_short": "must not be empty; write a text, or leave the key out",
}


class ConfigMistakesError(ConfigError):
    """Mistakes of one configuration.

    Attributes:
        lines: one for each.
    """

    def __init__(self, lines: Sequence[str]) -> None:
        """Take the first mistakes, and count the others."""
        more = len(lines) - MAX_LINES
        self.lines = [*lines[:MAX_LINES], *([f"and {more} more mistake{'s' * (more > 1)}"] if more > 0 else [])]
        super().__init__("\n".join(self.lines))


@dataclass(frozen=True)
class Mistake:
    """One mistake.

    Attributes:
        path: where it is; empty where it is one of the whole, as of a combination of keys.
        text: what was found, the rule, the cure.
        instead: value to write in place of the one that was found, as TOML, where that is the cure.
    """

    path: Path
    text: str
    instead: str | None = None


@dataclass(frozen=True)
class Place:
    """One key and what is known of it.

    Attributes:
        path: of the key, or of an entry of its list or table.
        kind: class of the table that it stands in.
        name: of the field that describes it.
        type: what is taken here.
    """

    path: Path
    kind: type[BaseModel]
    name: str
    type: KeyType

    @property
    def field(self) -> FieldInfo:
        """The field that describes it."""
        return self.kind.model_fields[self.name]

    @property
    def unit(self) -> str:
        """Unit of the key; empty for none."""
        return unit_of_field(self.kind, self.name)

    def entry(self, part: str | int, taken: KeyType) -> "Place":
        """Place of an entry of its list or table."""
        return Place((*self.path, part), self.kind, self.name, taken)


def mistakes_of(kind: type[BaseModel], tree: Mapping[str, Any], error: ValidationError | None) -> list[Mistake]:
    """Find all mistakes of a configuration.

    Args:
        kind: its class.
        tree: its values.
        error: what pydantic finds in it; None for nothing.

    Returns:
        The mistakes, each place once; empty where there are none.
    """
    found = list(_in_table(kind, tree, (), kind))
    known = {mistake.path for mistake in found}
    for detail in error.errors() if error else ():
        place = _place(kind, tree, detail["loc"])
        path = place.path if place else ()
        if detail["type"] in _FOUND_BEFORE and known:
            continue
        if any(path[: len(each)] == each or each[: len(path)] == path for each in known if path):
            continue
        found.append(_explain(place, detail))
        known.add(path)
    return found


def _in_table(kind: type[BaseModel], tree: Mapping[str, Any], path: Path, root: type[BaseModel]) -> Iterator[Mistake]:
    """Mistakes in names and types of a table's keys."""
    foreign = keys_of_another_kind(root, tree) if not path else {}
    for said, keys in foreign.items():
        are = f"{keys[0]} is a key" if len(keys) == 1 else f"{', '.join(keys)} are keys"
        yield Mistake((keys[0],), f"{are} {said}")
    for key, value in tree.items():
        taken = type_of(kind, key)
        if any(key in keys for keys in foreign.values()):
            continue
        if taken is None and getattr(kind, "has_free_keys", False):
            continue
        if taken is None:
            yield Mistake((*path, key), unknown_key(root, kind, (*path, key), value))
        else:
            yield from _in_value(Place((*path, key), kind, key, taken), value, root)
    for key, field in kind.model_fields.items():
        if field.is_required() and key not in tree:
            where = f"{heading(path)} has no {key}" if path else f"{key} is missing"
            meaning = f": {field.description}" if field.description else ""
            yield Mistake((*path, key), f"{where}; write {key} = {hints.example(key_type(field.annotation))}{meaning}")


def _in_value(place: Place, value: Any, root: type[BaseModel]) -> Iterator[Mistake]:
    taken = place.type
    if isinstance(value, Mapping) and taken.tables and not taken.is_list_of_tables:
        table = choose_table(taken.tables, place.field.get_default(), family := value.get("family"))
        if table is not None:
            yield from _in_table(table, value, place.path, root)
        else:
            families = tuple(family_of(each) or "" for each in taken.tables)
            inner = KeyType(" or ".join(map(toml, families)), values=families)
            inner_path = (*place.path, "family")
            yield Mistake(inner_path, *hints.wrong_type(inner_path, inner, family, ""))
    elif isinstance(value, Mapping) and taken.entries is not None:
        for key, each in value.items():
            yield from _in_value(place.entry(key, taken.entries), each, root)
    elif isinstance(value, list | tuple) and taken.items is not None and not _is_wrong_list(place, value):
        for number, each in enumerate(value):
            if isinstance(each, Mapping) and taken.items.tables:
                yield from _in_table(taken.items.tables[0], each, (*place.path, number), root)
            else:
                yield from _in_value(place.entry(number, taken.items), each, root)
    elif isinstance(value, int) and not isinstance(value, bool) and abs(value) >= MAX_INTEGER:
        yield Mistake(place.path, f"{dotted_key(place.path)}: this integer is beyond 64 bits; write a smaller one")
    elif not _fits(taken, value):
        yield Mistake(place.path, *hints.wrong_type(place.path, taken, value, place.unit))


def _is_wrong_list(place: Place, value: Sequence[Any]) -> bool:
    """Whether a list has another number of items than its key takes."""
    return place.type.length is not None and len(value) != place.type.length


def _fits(taken: KeyType, value: Any) -> bool:
    """Whether a value is of a type that a key takes; what no TOML has is left to pydantic."""
    match value:
        case bool():
            return bool in taken.scalars
        case int():
            return bool(taken.scalars & {int, float}) or value in taken.values
        case float():
            return float in taken.scalars or (int in taken.scalars and value.is_integer())
        case str():
            return str in taken.scalars or value in taken.values
        case list() | tuple():
            is_pair = len(value) == 2 and all(type(each) is int for each in value)
            return taken.is_range and is_pair and 0 <= value[0] <= value[1]
    return not isinstance(value, Mapping | date | time)


def _place(kind: type[BaseModel], tree: Mapping[str, Any], location: Sequence[int | str]) -> Place | None:
    """Place of what pydantic found, whose locations also name the members of unions; None for the whole."""
    place: Place | None = None
    tables: tuple[type[BaseModel], ...] = (kind,)
    value: Any = tree
    for part in location:
        if isinstance(part, int) and place and place.type.items:
            place = place.entry(part, place.type.items)
        elif isinstance(part, str) and place and place.type.entries and part in value:
            place = place.entry(part, place.type.entries)
        elif isinstance(part, str) and (table := next((each for each in tables if part in each.model_fields), None)):
            path = place.path if place else ()
            place = Place((*path, part), table, part, key_type(table.model_fields[part].annotation))
        else:
            tables = tuple(table for table in tables if str(part).endswith(family_of(table) or "\0")) or tables
            continue
        tables = place.type.tables
        value = _inner(value, part)
    return place


def _inner(value: Any, part: int | str) -> Any:
    try:
        return value[part]
    except (KeyError, IndexError, TypeError):
        return {}


def _explain(place: Place | None, detail: ErrorDetails) -> Mistake:
    """Say what pydantic found, in TOML's words."""
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if place is None:
        return Mistake((), message)
    value, name, error = detail["input"], dotted_key(place.path), detail["type"]
    if error == "value_error" and isinstance(value, Mapping | list | tuple | BaseModel):
        return Mistake(place.path, f"{name}: {message}")
    rule, instead = (message, None) if error == "value_error" else _rule(place, detail)
    return Mistake(place.path, f"{name} = {format_value(place.path, value)}: {rule}", instead)


def _rule(place: Place, detail: ErrorDetails) -> tuple[str, str | None]:
    """The rule that a value of the right type breaks, and a value that follows it where one can be told."""
    value, error = detail["input"], detail["type"]
    if error in _BROKEN_BOUNDS:
        bounds = [(words, bound) for _, words, bound in bounds_of(place.field)]
        return hints.out_of_bounds(value, bounds, place.unit)
    if error == "string_pattern_mismatch" and (rule := rule_of_field(place.field)):
        return f"must be {rule}", None
    return _RULES.get(error, f"found {type_name(value)}; {place.name} takes {place.type.with_article}"), None
