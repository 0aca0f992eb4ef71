"""Check of SQL conditions that strangers send: columns, constants and known functions, by DuckDB's own syntax tree.

What is not known to be harmless is refused, so that a later DuckDB brings no new way out. All that is left takes time
in proportion to the condition and the rows, and notices an interrupt at the next 2,048 rows. No function of the clock
is left: answers are remembered.
"""

import atexit
import json
import threading
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from embedder.errors import ConfigError
from embedder.retrieval.condition_columns import (
    MAX_NESTING,
    nesting,
    quoted_columns,
    unknown_column,
    words_hint,
)
from embedder.storage.printable import is_text, printable, readable

if TYPE_CHECKING:
    import duckdb

TABLE = "embeddings"
EXAMPLE = "write one condition, as \"price < 10 AND category = 'toys'\""
MAX_CHARACTERS, MAX_NODES = 4000, 500


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


LIKE = {"~~", "!~~", "~~*", "!~~*"}
LIKE_ESCAPE = {"like_escape", "not_like_escape", "ilike_escape", "not_ilike_escape"}
FUNCTIONS = _words(
    "abs ceil ceiling floor round trunc sign isfinite isinf isnan greatest least if ifnull nullif lower upper trim "
    "ltrim rtrim length len strlen left right substring substr contains starts_with prefix ends_with suffix instr "
    "position strpos list_contains list_has array_contains list_value list_extract array_extract struct_extract row "
    "date_part date_trunc year month day hour minute second quarter week dayofweek isodow dayofyear epoch make_date "
    "to_years to_months to_weeks to_days to_hours to_minutes to_seconds"
)
OPERATORS = LIKE | LIKE_ESCAPE | {"+", "-", "*", "/", "//", "%", "^@"}
TYPES = _words(
    "boolean tinyint smallint integer bigint hugeint utinyint usmallint uinteger ubigint float double decimal varchar "
    "date time timestamp interval uuid timestamptz"
) | {"timestamp with time zone"}
CLASSES: Mapping[str, tuple[str, ...]] = {
    "BETWEEN": ("COMPARE_BETWEEN",),
    "CASE": ("CASE_EXPR",),
    "CAST": ("OPERATOR_CAST",),
    "COLUMN_REF": ("COLUMN_REF",),
    "COMPARISON": (
        *("COMPARE_EQUAL", "COMPARE_NOTEQUAL", "COMPARE_LESSTHAN", "COMPARE_GREATERTHAN"),
        *("COMPARE_LESSTHANOREQUALTO", "COMPARE_GREATERTHANOREQUALTO"),
        *("COMPARE_DISTINCT_FROM", "COMPARE_NOT_DISTINCT_FROM"),
    ),
    "CONJUNCTION": ("CONJUNCTION_AND", "CONJUNCTION_OR"),
    "CONSTANT": ("VALUE_CONSTANT",),
    "FUNCTION": ("FUNCTION",),
    "OPERATOR": (
        *("OPERATOR_NOT", "OPERATOR_IS_NULL", "OPERATOR_IS_NOT_NULL", "OPERATOR_COALESCE"),
        *("COMPARE_IN", "COMPARE_NOT_IN", "ARRAY_EXTRACT", "STRUCT_EXTRACT"),
    ),
    "TYPE": ("TYPE",),
}
_NAMES = {"SUBQUERY": "a subquery", "WINDOW": "a window", "LAMBDA": "a lambda", "PARAMETER": "a parameter"}
# Parts of a tree that are no expressions: literals, arguments, branches of CASE, and an ORDER BY, which must be empty.
_PLAIN_KEYS = (
    {"kind", "text"},
    {"name", "expression"},
    {"when_expr", "then_expr"},
    {"path"},
    {"type", "orders"},
)

Node = dict[str, Any]
_TURN = threading.Lock()
_TOO_MANY: Node = {"class": "TOO_MANY"}


def check_condition(where: str, columns: Mapping[str, str]) -> str:
    """Refuse a condition that does more than compare columns of the table.

    Args:
        where: a SQL expression.
        columns: types of the columns that it may read, by their names.

    Returns:
        The condition as it is to be evaluated, with columns that are named like words of SQL in double quotes.

    Raises:
        ConfigError: it is too long or nested too deeply, no single expression, or has anything but these columns,
            constants and functions that are known here.
    """
    if not is_text(where):
        raise ConfigError(f"where {readable(where)[:200]!r}: it is no UTF-8 text; {EXAMPLE}")
    if len(where) > MAX_CHARACTERS:
        raise ConfigError(f"where: it has {len(where):,} characters; at most {MAX_CHARACTERS:,} are taken; shorten it")
    quoted, problem = _check_condition(where, tuple(columns.items()))
    if problem is not None:
        raise ConfigError(f"where {printable(where, 200)!r}: {problem}; {EXAMPLE}")
    return quoted


@lru_cache(maxsize=1024)
def _check_condition(where: str, columns: tuple[tuple[str, str], ...]) -> tuple[str, str | None]:
    """Condition with its columns quoted, and its problem in words; None where there is none."""
    if nesting(where) > MAX_NESTING:
        return where, f"it has brackets inside more than {MAX_NESTING} others; leave some out"
    types = dict(columns)
    quoted = quoted_columns(where, types)
    return quoted, _problem(quoted, types)


def _problem(where: str, columns: Mapping[str, str]) -> str | None:
    try:
        tree = _parse(where)
    except RecursionError:
        return "it is nested too deeply; leave out parentheses and NOTs"
    if tree.get("error"):
        reason = str(tree.get("error_message") or "it can't be parsed").splitlines()[0]
        return reason + words_hint(where, columns)
    statements = tree["statements"]
    condition = statements[0]["node"].pop("where_clause", None) if len(statements) == 1 else None
    if condition is None or _without_places(statements) != _without_places(_bare_statements()):
        return "it is no single expression"
    nodes = list(_nodes(condition, MAX_NODES))
    if nodes[-1] is _TOO_MANY:
        return f"it has more than {MAX_NODES} parts; shorten it"
    return next((found for node in nodes if (found := _problem_of(node, where, columns)) is not None), None)


def _problem_of(node: Node, where: str, columns: Mapping[str, str]) -> str | None:
    kind = node.get("class")
    if kind is None:
        is_known = not node.get("orders") and any(set(node) <= keys for keys in _PLAIN_KEYS)
        return None if is_known else "it has a part that is not known"
    if node.get("type") not in CLASSES.get(kind, ()):
        return f"it has {_NAMES.get(kind, printable(str(node.get('type')).lower(), 50))}, which is not taken here"
    if kind == "COLUMN_REF":
        return _problem_of_column(node["column_names"], where, columns)
    if kind == "TYPE":
        return _problem_of_type(node)
    return _problem_of_function(node) if kind == "FUNCTION" else None


def _problem_of_type(node: Node) -> str | None:
    """Problem of a type: only DECIMAL(10, 2) has parts, as a type of values that hold others can be of any size."""
    is_simple = all(child.get("class") == "CONSTANT" for child in node["children"])
    if node["type_name"].lower() in TYPES and is_simple and not node["schema"] and not node["catalog"]:
        return None
    return f"the type {printable(node['type_name'], 50)} is not taken here"


def _problem_of_column(path: list[str], where: str, columns: Mapping[str, str]) -> str | None:
    names, known = [name.lower() for name in path], {name.lower() for name in columns}
    if names[0] in known or (len(names) > 1 and names[0] == TABLE and names[1] in known):
        return None
    return unknown_column(".".join(path), where, columns)


def _problem_of_function(node: Node) -> str | None:
    name, arguments = node["function_name"].lower(), node["arguments"]
    if name not in (OPERATORS if node["is_operator"] else FUNCTIONS) or node["schema"] or node["catalog"]:
        return f"the function {printable(name, 50)} is not taken here; docs/serve.md has a list of those that are"
    if node["filter"] is not None or node["distinct"] or node["export_state"]:
        return f"{name} is no aggregate here"
    if name in LIKE | LIKE_ESCAPE:
        text = arguments[1]["expression"].get("literal", {}).get("text")
        # DuckDB then tries each place of a text for each `%`: three of them take minutes, and no interrupt is noticed.
        is_slow = text is not None and "%" in text[1:-1] and ("_" in text or name in LIKE_ESCAPE)
        if text is None or is_slow:
            return "the pattern of LIKE has to be a text; one with _ or ESCAPE has a % at its ends only"
    return None


def _nodes(tree: Node, most: int) -> Iterator[Node]:
    """Dictionaries of a tree, until so many are no constants; without recursion, as strangers choose the depth."""
    waiting: list[Any] = [tree]
    while waiting and most > 0:
        part = waiting.pop()
        if isinstance(part, dict):
            if part.get("class") not in (None, "CONSTANT"):
                most -= 1
            yield part
            waiting.extend(part.values())
        elif isinstance(part, list):
            waiting.extend(part)
    if waiting:
        yield _TOO_MANY


def _without_places(tree: Any) -> Any:
    """Copy of a small tree without the positions in the text."""
    if isinstance(tree, dict):
        return {key: _without_places(value) for key, value in tree.items() if not key.startswith("query_location")}
    return [_without_places(each) for each in tree] if isinstance(tree, list) else tree


@lru_cache(maxsize=1)
def _bare_statements() -> Any:
    statements = _parse("true")["statements"]
    del statements[0]["node"]["where_clause"]
    return statements


def _parse(where: str) -> Node:
    """Parse a statement of nothing but the condition; the line breaks end a comment, which would hide a parenthesis."""
    with _TURN:
        found = _connection().execute("SELECT json_serialize_sql(?)", [f"SELECT 1 WHERE (\n{where}\n)"]).fetchall()
    tree: Node = json.loads(found[0][0])
    return tree


@lru_cache(maxsize=1)
def _connection() -> "duckdb.DuckDBPyConnection":
    import duckdb

    atexit.register(_connection.cache_clear)  # else its library complains of what is left at the end
    return duckdb.connect(":memory:", config={"threads": "1", "memory_limit": "256MB", "lock_configuration": "true"})
