"""Effective configuration: every key with its effective value and its origin, as TOML that loads again."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from embedder.config_toml.config_reference import plain
from embedder.config_toml.fields import listed_tables
from embedder.config_toml.load_config import Origins
from embedder.config_toml.values import Path, dotted_key, heading, toml, toml_key, without_secrets

COMMENT_COLUMN = 44


@dataclass(frozen=True)
class Value:
    """One effective value.

    `value` has TOML's types, with secrets masked (`is_masked`); None if the key isn't set. `origin` says where it is
    from.
    """

    path: Path
    value: Any
    origin: str
    is_masked: bool = False


@dataclass(frozen=True)
class TomlTable:
    """One table, its own values before the tables in it."""

    path: Path
    values: tuple[Value, ...]
    tables: tuple["TomlTable", ...]


def effective(
    config: BaseModel, origins: Origins, environment: Mapping[str, tuple[Any, str]] | None = None
) -> TomlTable:
    """Collect the values of a configuration.

    `origins` say where they are from. `environment` has, for keys at the top level, the value that the environment
    gives instead and the name of the variable.
    """
    return _table(config, (), origins, environment or {})


def _table(config: BaseModel, path: Path, origins: Origins, environment: Mapping[str, tuple[Any, str]]) -> TomlTable:
    values: list[Value] = []
    tables: list[TomlTable] = []
    for key in type(config).model_fields:
        value, inner = getattr(config, key), (*path, key)
        if not path and key in environment:
            value, variable = environment[key]
            values.append(_value(inner, value, f"environment {variable}"))
        elif isinstance(value, BaseModel):
            tables.append(_table(value, inner, origins, {}))
        elif isinstance(value, tuple) and listed_tables(type(config).model_fields[key].annotation):
            tables += [_table(each, (*inner, number), origins, {}) for number, each in enumerate(value)]
        elif isinstance(value, Mapping):
            entries = (_value((*inner, name), each, origins.of((*inner, name))) for name, each in value.items())
            tables.append(TomlTable(inner, tuple(entries), ()))
        else:
            values.append(_value(inner, plain(value), origins.of(inner)))
    for key, value in (config.model_extra or {}).items():  # keys that another layer checks
        values.append(_value((*path, key), value, origins.of((*path, key))))
    return TomlTable(path, tuple(values), tuple(tables))


def _value(path: Path, value: Any, origin: str) -> Value:
    masked = without_secrets(path, list(value) if isinstance(value, tuple) else value)
    return Value(path, masked, origin, is_masked=masked != (list(value) if isinstance(value, tuple) else value))


def values_of(table: TomlTable) -> Iterator[Value]:
    """Yield all values of a table and of those within it."""
    yield from table.values
    for inner in table.tables:
        yield from values_of(inner)


def lines_of(table: TomlTable) -> Iterator[str]:
    """Format a table as TOML; comments give the origin of each value."""
    if table.path:
        yield ""
        yield heading(table.path)
    for value in table.values:
        key = toml_key(str(value.path[-1]))
        if value.value is None:
            yield f"# {key} is not set"
        elif not _can_be_written(value.value):
            yield f"# {key} can't stand in TOML: it holds bytes that are no UTF-8 ({value.origin})"
        else:
            secret = "; a secret is left out: write it again" if value.is_masked else ""
            yield f"{f'{key} = {toml(value.value)}':<{COMMENT_COLUMN}}  # {value.origin}{secret}"
    for inner in table.tables:
        yield from lines_of(inner)


def _can_be_written(value: Any) -> bool:
    try:
        toml(value).encode()
    except UnicodeEncodeError:
        return False
    return True


def as_data(table: TomlTable) -> dict[str, dict[str, Any]]:
    """Return values for JSON by dotted key, each with its origin; list entries are numbered from 0."""
    return {
        ".".join(str(part) if isinstance(part, int) else dotted_key((part,)) for part in value.path): {
            "value": value.value,
            "from": value.origin,
            "is_masked": value.is_masked,
        }
        for value in values_of(table)
    }
