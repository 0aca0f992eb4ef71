"""Fields of a configuration's classes: what a key takes, in TOML's words, and the tables below it."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from embedder.config_toml.units import SHARE, unit_of
from embedder.config_toml.values import Path

BOUNDS = (("ge", ">=", "at least"), ("gt", ">", "more than"), ("le", "<=", "at most"), ("lt", "<", "less than"))
MAX_NAMED = 9
"""Most values that the type of a key names."""

_NAMES = {str: "string", int: "integer", float: "number", bool: "true or false"}
_ARTICLES = {"string": "a ", "number": "a ", "integer": "an ", "list": "a ", "table": "a "}


def members(annotation: Any) -> list[Any]:
    """Return the types that an annotation allows, each without its rules, and without None."""
    if get_origin(annotation) is Annotated:
        return members(get_args(annotation)[0])
    if get_origin(annotation) in (UnionType, Union):
        return [member for each in get_args(annotation) if each is not NoneType for member in members(each)]
    return [annotation]


def type_words(annotation: Any) -> str:
    """Describe what a key takes, without an article: `integer or "auto"`."""
    return " or ".join(dict.fromkeys(map(_words, members(annotation))))


def takes(annotation: Any) -> str:
    """Describe what a key takes, as a phrase after "takes"."""
    words = type_words(annotation)
    return _ARTICLES.get(words.partition(" ")[0], "") + words


def _words(member: Any) -> str:
    origin, arguments = get_origin(member), get_args(member)
    if origin is Literal:  # more would leave a table no room for their meaning, which names them
        return " or ".join(map(json.dumps, arguments)) if len(arguments) <= MAX_NAMED else "string"
    if origin is dict:
        return f"table of {type_words(arguments[1])}s"
    if origin is tuple:
        number = "" if arguments[-1] is Ellipsis else f"{len(arguments)} "
        return "tables" if tables_in(arguments[0]) else f"list of {number}{type_words(arguments[0])}s"
    if is_dataclass(member):
        return "[start, stop]"
    return "table" if issubclass(member, BaseModel) else _NAMES.get(member, "string")


def choices(annotation: Any) -> list[Any]:
    """Return the single values that a key takes: those of an enumeration."""
    return [value for member in members(annotation) if get_origin(member) is Literal for value in get_args(member)]


def entry_type(annotation: Any) -> Any:
    """Return the type of the entries of a list or of a table with free keys; None for other keys."""
    found = (get_args(member) for member in members(annotation) if get_origin(member) in (dict, tuple))
    return next((arguments[0 if arguments[-1] is Ellipsis else -1] for arguments in found), None)


def tables_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the classes of the table that a key takes; several if its key `family` chooses among them."""
    return [member for member in members(annotation) if isinstance(member, type) and issubclass(member, BaseModel)]


def listed_tables(annotation: Any) -> list[type[BaseModel]]:
    """Return the classes of the entries of a list of tables, `[[name]]`; none for other keys."""
    entry = entry_type(annotation) if "tables" in map(_words, members(annotation)) else None
    return [] if entry is None else tables_in(entry)


def family_of(kind: type[BaseModel]) -> str:
    """Return the value of `family` that chooses this class among several; empty if there is no choice."""
    field = kind.model_fields.get("family")
    return "" if field is None else str(field.default)


class Place(NamedTuple):
    """What is known of a place in a configuration.

    Attributes:
        kind: class of the table that holds the key.
        key: its name; empty for the whole configuration.
        annotation: what is taken here, possibly for an entry of the key's list or table; None if there is no such key.
        tables: classes of the table here, the likeliest first.
    """

    kind: type[BaseModel]
    key: str
    annotation: Any
    tables: list[type[BaseModel]]

    @property
    def field(self) -> FieldInfo:
        """The field that describes the key."""
        return self.kind.model_fields[self.key]


def find_place(root: type[BaseModel], tree: Any, path: Path) -> Place:
    """Find the field of a path, to a key or to an entry of its list or table, in the values `tree` of class `root`."""
    place = Place(root, "", None, [root])
    for part in path:
        tree, default = value_at(tree, (part,)), None
        if kind := next((kind for kind in place.tables if part in kind.model_fields), None):
            field = kind.model_fields[str(part)]
            place, annotation, default = place._replace(kind=kind, key=str(part)), field.annotation, field.default
        else:
            annotation = entry_type(place.annotation)
        meant = tree.get("family") if isinstance(tree, Mapping) else None
        tables = [] if annotation is None else tables_in(annotation)
        tables.sort(key=lambda each: family_of(each) != meant if meant else type(default) is not each)
        place = place._replace(annotation=annotation, tables=tables)
    return place


def value_at(tree: Any, path: Path) -> Any:
    """Return the value at a path; None if there is none."""
    for part in path:
        try:
            tree = tree[part]
        except (KeyError, IndexError, TypeError):
            return None
    return tree


def unit_of_field(kind: type[BaseModel], key: str) -> str:
    """Return the unit of a key, from its field or else from its name; empty for none."""
    field = kind.model_fields[key]
    if unit := extra_of(field, "unit") or unit_of(key):
        return unit
    return SHARE if float in members(field.annotation) and ("<=", "at most", 1) in bounds_of(field) else ""


def extra_of(field: FieldInfo, name: str) -> str:
    """Return a field's `unit`, `rule` or `default` in words, which pydantic doesn't have; empty if it has none."""
    extra = field.json_schema_extra
    return str(extra.get(name, "")) if isinstance(extra, dict) else ""


def bounds_of(field: FieldInfo) -> list[tuple[str, str, float]]:
    """Return the bounds of a number: the sign, the same in words, the number."""
    return [
        (sign, words, bound)
        for rule in [*field.metadata, *_rules_within(field.annotation)]
        for name, sign, words in BOUNDS
        if (bound := getattr(rule, name, None)) is not None
    ]


def _rules_within(annotation: Any) -> Iterator[Any]:
    """Yield the rules within an annotation: of a member of a union, of the entries of a table."""
    first, *rules = get_args(annotation) or (None,)
    if get_origin(annotation) is Annotated:
        yield from (each for rule in rules for each in (rule.metadata if isinstance(rule, FieldInfo) else [rule]))
        rules = []
    for inner in (first, *rules):
        if get_origin(inner) is not None:
            yield from _rules_within(inner)


@dataclass(frozen=True)
class TableType:
    """One type of table in a configuration.

    `keys` lead from the top to it, none for the top; `is_list` says whether it is written in double brackets.
    """

    keys: tuple[str, ...]
    is_list: bool
    kind: type[BaseModel]

    @property
    def heading(self) -> str:
        """Its header; empty for the top."""
        name = ".".join(self.keys)
        return name and (f"[[{name}]]" if self.is_list else f"[{name}]")


@cache
def tables_below(kind: type[BaseModel], keys: tuple[str, ...] = (), is_list: bool = False) -> tuple[TableType, ...]:
    """List all tables of a configuration class, itself first, in the order of the keys.

    `keys` lead from the top to it; `is_list` says whether it is written in double brackets.
    """
    found = [TableType(keys, is_list, kind)]
    for key, field in kind.model_fields.items():
        listed = listed_tables(field.annotation)
        for table in listed or tables_in(field.annotation):
            found += tables_below(table, (*keys, key), bool(listed))
    return tuple(found)
