"""Types that keys take, read from the fields of a configuration's classes, in TOML's words."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from embedder.config_toml.units import SHARE, unit_of

Scalar = type[str] | type[int] | type[float] | type[bool]
NAMES: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "true or false"}
RANGE = "[start, stop]"
BOUNDS = (("ge", ">=", "at least"), ("gt", ">", "more than"), ("le", "<=", "at most"), ("lt", "<", "less than"))
_ARTICLES = {"string": "a ", "number": "a ", "integer": "an ", "list": "a ", "table": "a "}

MAX_NAMED = 9
"""Most values that the type of a key names."""


@dataclass(frozen=True)
class KeyType:
    """Type of one key.

    Attributes:
        name: in TOML's words, without an article: `integer or "auto"`.
        scalars: Python's types of the plain values that it takes.
        values: the single values that it takes beside those: an enumeration.
        tables: classes of the table that it takes; several where a key of the table says which.
        items: type of a list's items.
        length: number of a list's items; None for any.
        entries: type of the values of a table whose keys are free.
        is_range: whether it takes a range of layers.
    """

    name: str
    scalars: frozenset[Scalar] = frozenset()
    values: tuple[str | int, ...] = ()
    tables: tuple[type[BaseModel], ...] = ()
    items: "KeyType | None" = None
    length: int | None = None
    entries: "KeyType | None" = None
    is_range: bool = False

    @property
    def with_article(self) -> str:
        """The name, as it goes on after "takes"."""
        return _ARTICLES.get(self.name.partition(" ")[0], "") + self.name

    @property
    def is_list_of_tables(self) -> bool:
        """Whether it is written as `[[name]]`."""
        return self.items is not None and bool(self.items.tables)

    @property
    def is_table(self) -> bool:
        """Whether it is written as `[name]`."""
        return bool(self.tables) or self.entries is not None


def key_type(annotation: Any) -> KeyType:
    """Read the type that a field's annotation describes."""
    return _read(annotation)


@cache
def _read(annotation: Any) -> KeyType:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return key_type(arguments[0])
    if origin in (UnionType, Union):
        return _any_of([key_type(each) for each in arguments if each is not NoneType])
    if origin in (dict, tuple):
        return _table_of(arguments[1]) if origin is dict else _list_of(arguments)
    if origin is Literal:
        named = len(arguments) <= MAX_NAMED  # more would leave a table no room for their meaning, which names them
        return KeyType(" or ".join(map(json.dumps, arguments)) if named else "string", values=arguments)
    if is_dataclass(annotation):
        return KeyType(RANGE, is_range=True)
    is_table = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return KeyType("table", tables=(annotation,)) if is_table else KeyType(NAMES[annotation], frozenset({annotation}))


def _table_of(annotation: Any) -> KeyType:
    entries = key_type(annotation)
    return KeyType(f"table of {entries.name}s", entries=entries)


def _list_of(arguments: tuple[Any, ...]) -> KeyType:
    items = key_type(arguments[0])
    length = None if arguments[-1] is Ellipsis else len(arguments)
    name = "tables" if items.tables else f"list of {'' if length is None else f'{length} '}{items.name}s"
    return KeyType(name, items=items, length=length)


def _any_of(choices: list[KeyType]) -> KeyType:
    if len(choices) == 1:
        return choices[0]
    return KeyType(
        " or ".join(dict.fromkeys(choice.name for choice in choices)),
        scalars=frozenset().union(*(choice.scalars for choice in choices)),
        values=tuple(value for choice in choices for value in choice.values),
        tables=tuple(table for choice in choices for table in choice.tables),
        items=next((choice.items for choice in choices if choice.items), None),
        length=next((choice.length for choice in choices if choice.length), None),
        entries=next((choice.entries for choice in choices if choice.entries), None),
        is_range=any(choice.is_range for choice in choices),
    )


def type_of(kind: type[BaseModel], key: str) -> KeyType | None:
    """Type of a table's key; None where the table has no such key."""
    field = kind.model_fields.get(key)
    return None if field is None else key_type(field.annotation)


def unit_of_field(kind: type[BaseModel], key: str) -> str:
    """Unit of a key: what its field says, else what its name tells; empty for none."""
    field = kind.model_fields[key]
    if unit := str(_extra(field).get("unit", unit_of(key))):
        return unit
    bounds = {sign: bound for sign, _, bound in bounds_of(field)}
    return SHARE if float in key_type(field.annotation).scalars and bounds.get("<=") == 1 else ""


def rule_of_field(field: FieldInfo) -> str:
    """Rule of a string in words, where its field has a pattern."""
    return str(_extra(field).get("rule", ""))


def default_in_words(field: FieldInfo) -> str:
    """Default that depends on other keys, in words; empty where it is a value."""
    return str(_extra(field).get("default", ""))


def _extra(field: FieldInfo) -> dict[str, Any]:
    extra = field.json_schema_extra
    return extra if isinstance(extra, dict) else {}


def bounds_of(field: FieldInfo) -> list[tuple[str, str, float]]:
    """Bounds of a number: the sign, the same in words, the number."""
    return [
        (sign, words, bound)
        for rule in [*field.metadata, *_metadata(field.annotation)]
        for name, sign, words in BOUNDS
        if (bound := getattr(rule, name, None)) is not None
    ]


def _metadata(annotation: Any) -> Iterator[Any]:
    """Rules within an annotation: of a member of a union, of the entries of a table."""
    first, *rules = get_args(annotation) or (None,)
    if get_origin(annotation) is Annotated:
        yield from (each for rule in rules for each in (rule.metadata if isinstance(rule, FieldInfo) else [rule]))
        rules = []
    for inner in (first, *rules):
        if get_origin(inner) is not None:
            yield from _metadata(inner)


def family_of(kind: type[BaseModel]) -> str | None:
    """Value of `family` that chooses this class among several; None where there is no choice."""
    field = kind.model_fields.get("family")
    return None if field is None else str(field.default)


def choose_table(tables: tuple[type[BaseModel], ...], default: Any, family: Any) -> type[BaseModel] | None:
    """Class of a table, by its `family` where several are possible.

    Args:
        tables: the classes.
        default: default value of the key, whose class is meant where no family is named.
        family: value of `family` as found; None for none.

    Returns:
        The class; None where no class is of that family.
    """
    if len(tables) == 1:
        return tables[0]
    if family is None:
        return type(default) if type(default) in tables else tables[0]
    return next((table for table in tables if family_of(table) == family), None)


@dataclass(frozen=True)
class TableType:
    """One kind of table in a configuration.

    Attributes:
        keys: from the top to it; none for the top.
        is_list: whether it is written in double brackets.
        kind: its class.
    """

    keys: tuple[str, ...]
    is_list: bool
    kind: type[BaseModel]

    @property
    def heading(self) -> str:
        """Its header; empty for the top."""
        name = ".".join(self.keys)
        return name and (f"[[{name}]]" if self.is_list else f"[{name}]")


def tables_below(kind: type[BaseModel], keys: tuple[str, ...] = (), is_list: bool = False) -> Iterator[TableType]:
    """All tables of a configuration, itself first, in the order of the keys.

    Args:
        kind: its class.
        keys: from the top to it.
        is_list: whether it is written in double brackets.
    """
    yield TableType(keys, is_list, kind)
    for key, field in kind.model_fields.items():
        taken = key_type(field.annotation)
        for table in taken.items.tables if taken.items else taken.tables:
            yield from tables_below(table, (*keys, key), taken.is_list_of_tables)
