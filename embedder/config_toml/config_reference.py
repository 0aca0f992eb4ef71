"""Reference of a configuration's keys: type, default, unit and meaning, from the fields and their descriptions.

`embedder config --reference` and docs/configuration.md are both printed from it.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from embedder.config_toml.fields import (
    TableType,
    bounds_of,
    extra_of,
    family_of,
    find_place,
    listed_tables,
    tables_below,
    tables_in,
    type_words,
    unit_of_field,
)
from embedder.config_toml.values import toml

SEVERAL = "one of several families of towers"


@dataclass(frozen=True)
class ReferenceKey:
    """One key.

    Attributes:
        name: as in a file.
        type: in TOML's words, with its bounds.
        default: as TOML writes it; `required`, or words if it depends on other keys; empty if it isn't set.
        unit: empty for none.
        meaning: its purpose.
        table: header of the table that it holds; empty for a plain value.
    """

    name: str
    type: str
    default: str
    unit: str
    meaning: str
    table: str


@dataclass(frozen=True)
class Section:
    """One table.

    `heading` is its header, empty for the top level. `family` is the value of its key `family` if that chooses among
    several tables, else empty; `is_default` marks the family that is used if none is named.
    """

    heading: str
    family: str
    is_default: bool
    summary: str
    keys: tuple[ReferenceKey, ...]


def sections_of(kind: type[BaseModel], known: Collection[type[BaseModel]] = ()) -> list[Section]:
    """Describe all tables of a configuration class, top level first, except for `known` ones described elsewhere."""
    tables = [table for table in tables_below(kind) if not table.keys or table.kind not in known]
    return [_section(table, [each for each in tables if each.keys == table.keys], kind) for table in tables]


def kinds_of(kind: type[BaseModel]) -> set[type[BaseModel]]:
    """Return the classes of all tables of a configuration."""
    return {table.kind for table in tables_below(kind)}


def _section(table: TableType, families: list[TableType], root: type[BaseModel]) -> Section:
    is_family = len(families) > 1
    return Section(
        heading=table.heading,
        family=family_of(table.kind) if is_family else "",
        is_default=is_family and find_place(root, {}, table.keys).tables[0] is table.kind,
        summary=_summary(table.kind),
        keys=tuple(_keys(table)),
    )


def _keys(table: TableType) -> Iterator[ReferenceKey]:
    for name, field in table.kind.model_fields.items():
        listed = listed_tables(field.annotation)
        inner = listed or tables_in(field.annotation)
        heading = TableType((*table.keys, name), bool(listed), table.kind).heading if inner else ""
        summary = "" if not inner else SEVERAL if len(inner) > 1 else _summary(inner[0]).rstrip(".")
        bounds = [f"{sign} {toml_number(bound)}" for sign, _, bound in bounds_of(field)]
        yield ReferenceKey(
            name=name,
            type=", ".join([type_words(field.annotation), *bounds]),
            default=_default(field, is_table=bool(inner)),
            unit=unit_of_field(table.kind, name),
            meaning=field.description or summary or _upstream(table.kind, name),
            table=heading,
        )


def _summary(kind: type[BaseModel]) -> str:
    return (kind.__doc__ or "").strip().partition("\n\n")[0]


def _upstream(kind: type[BaseModel], key: str) -> str:
    """Describe a key without its own description: in a tower, as in the library that builds it."""
    if not family_of(kind):
        return ""
    if key == "family":
        return "names the family"
    library_class = getattr(kind, "library_class", None)
    return f"as in transformers' `{library_class}`" if library_class else "as in timm"


def _default(field: FieldInfo, *, is_table: bool) -> str:
    if words := extra_of(field, "default"):
        return words
    value = field.get_default()
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, BaseModel) or value is None or value == {} or (value == () and is_table):
        return ""
    return toml_number(value) if isinstance(value, float) else toml(plain(value))


def plain(value: Any) -> Any:
    """Convert a value to TOML's types: a range of layers is a list of two."""
    return [value.start, value.stop] if hasattr(value, "start") and hasattr(value, "stop") else value


def toml_number(value: float) -> str:
    """Format a number of a default or a bound; whole numbers without a decimal point."""
    return toml(value) if isinstance(value, int) else f"{value:g}"
