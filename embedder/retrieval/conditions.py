"""Check of SQL conditions from untrusted users, on DuckDB's own syntax tree: only columns, constants, known functions.

Whatever is not known to be harmless is refused, so a new DuckDB version opens no new hole. What is allowed takes time
proportional to the condition and the rows, and notices an interrupt within 2,048 rows. Functions of the clock are
refused because answers are cached.
"""

import atexit
import difflib
import json
import re
import threading
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from itertools import combinations
from typing import TYPE_CHECKING, Any

from embedder.errors import ConfigError
from embedder.medium_columns import BY_NAME
from embedder.retrieval.cities import find_city
from embedder.storage.printable import is_text, printable, readable
from embedder.store.schema import VECTOR_COLUMNS

if TYPE_CHECKING:
    import duckdb

MAX_NESTING = 30  # nested brackets; DuckDB takes 0.2 s to find a mistake inside 30 of them, 2 s inside 250
MAX_WORDS = 3  # SQL keywords used as columns in one condition; 7 ways to quote them are tried
MAX_LISTED, MAX_TYPE_CHARACTERS = 40, 60  # columns in a message, and characters of each type
PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
WORD = re.compile(rb"[A-Za-z_]+")
MODEL_COLUMN = re.compile(rb'([A-Za-z_][A-Za-z0-9_]*)\.(?:([A-Za-z_][A-Za-z0-9_]*)|"((?:[^"]|"")+)")')


def quoted_columns(where: str, columns: Collection[str]) -> str:
    """Put columns named like SQL keywords in double quotes: `group = 'a'` becomes `"group" = 'a'`.

    Columns of other models, which SQL would read as a table's, are quoted too: `"labels.top" = 'cat'`. Literals,
    comments and quoted names stay as they are. The condition is returned unchanged if it parses as it is, or unless
    exactly one choice of keywords to quote makes it parse.
    """
    where = _with_place(_with_model_columns(where, columns))
    words = column_words(where, columns)
    if not words or len(words) > MAX_WORDS or nesting(where) > MAX_NESTING or _can_be_parsed(where):
        return where
    choices = [chosen for size in range(1, len(words) + 1) for chosen in combinations(words, size)]
    tried = [_quote(where, [place for word in chosen for place in words[word]]) for chosen in choices]
    parsed = [each for each in tried if _can_be_parsed(each)]
    return parsed[0] if len(parsed) == 1 else where


def _with_model_columns(where: str, columns: Collection[str]) -> str:
    """Put NAME.COLUMN in double quotes, except where NAME is itself a column, of which COLUMN is a field."""
    known = {column.lower(): column for column in columns}
    if not is_text(where) or not any("." in name for name in known):
        return where
    import duckdb

    content, pieces, end = where.encode(), [], 0
    for start, kind in duckdb.tokenize(where):
        is_name = kind in (duckdb.token_type.identifier, duckdb.token_type.keyword)
        found = MODEL_COLUMN.match(content, start) if is_name and start >= end else None
        if found is None or content[:start].rstrip().endswith(b"."):
            continue
        model, column = found[1].decode().lower(), (found[2] or found[3].replace(b'""', b'"')).decode().lower()
        if model not in known and f"{model}.{column}" in known:
            name = known[f"{model}.{column}"].replace('"', '""')
            pieces += [content[end:start], f'"{name}"'.encode()]
            end = found.end()
    return b"".join([*pieces, content[end:]]).decode()


def _with_place(where: str) -> str:
    """Put a row's latitude and longitude before the arguments of `within`, and those of a city in its name's place."""
    if WITHIN not in where.lower() or not is_text(where):
        return where
    import duckdb

    content, end, pieces = where.encode(), 0, list[bytes]()
    for start, kind in duckdb.tokenize(where):
        found = CALL.match(content, start)
        if found is not None and kind in (duckdb.token_type.identifier, duckdb.token_type.keyword):
            pieces += [content[end : found.end()], ", ".join((*PLACE_COLUMNS, "")).encode()]
            end = found.end()
            if named := NAME.match(content, end):
                city = find_city(named[1].decode().replace("''", "'"))
                pieces, end = [*pieces, f"{city.latitude}, {city.longitude}".encode()], named.end()
    return b"".join([*pieces, content[end:]]).decode()


def nesting(where: str) -> int:
    """Return the greatest depth of open brackets in a condition, ignoring literals and comments."""
    import duckdb

    content, level, most = where.encode(), 0, 0
    for start, kind in duckdb.tokenize(where):
        if kind == duckdb.token_type.operator:
            character = content[start : start + 1]
            level += (character in b"([{") - (character in b")]}")
            most = max(most, level)
    return most


def column_words(where: str, columns: Collection[str]) -> dict[str, list[tuple[int, int]]]:
    """Find SQL keywords in a condition that are also columns: lower-case word to its (start, end) byte offsets."""
    names = {column.lower() for column in columns} & _reserved_words()
    if not names or not is_text(where):
        return {}
    import duckdb

    content = where.encode()
    places: dict[str, list[tuple[int, int]]] = {}
    for start, kind in duckdb.tokenize(where):
        found = WORD.match(content, start) if kind == duckdb.token_type.keyword else None
        if found is not None and (word := found[0].decode().lower()) in names:
            places.setdefault(word, []).append(found.span())
    return places


def words_hint(where: str, columns: Collection[str]) -> str:
    """Return the hint, possibly empty, that ends a message about an unparsable condition: how to write its columns."""
    words = column_words(where, columns)
    names = ", ".join(f'"{word}"' for word in words)
    return f"; a column with the name of a word of SQL stands in double quotes: {names}" if words else ""


def list_columns(where: str, columns: Mapping[str, str]) -> str:
    """List columns as conditions write them, with types, and an example for a column that holds lists."""
    shown = [f"{_format_name(name)} {printable(kind, MAX_TYPE_CHARACTERS)}" for name, kind in columns.items()]
    more = f" and {len(shown) - MAX_LISTED:,} more" if len(shown) > MAX_LISTED else ""
    lists = [name for name, kind in columns.items() if kind.endswith("]") and not kind.startswith("STRUCT")]
    asked = [name for name in lists if name.lower() in where.lower()] or [each for each in lists if each not in BY_NAME]
    hints = [
        f"; ask for a value of a list as list_contains({_format_name(name)}, {_value(columns[name])})" for name in asked
    ]
    return f"{', '.join(shown[:MAX_LISTED])}{more}{''.join(hints[:1])}"


def unknown_column(name: str, where: str, columns: Mapping[str, str]) -> str:
    """Return the error message about an unknown column."""
    near = difflib.get_close_matches(name.lower(), [column.lower() for column in columns], n=2)
    if name in VECTOR_COLUMNS:
        cure = "vectors are no part of a condition."
    elif near:
        cure = f"did you mean {' or '.join(_format_name(each) for each in columns if each.lower() in near)}?"
    elif _is_value(name, where):
        cure = f"a text stands in single quotes: '{printable(name, 100)}'."
    else:
        cure = "a column of a source is there once it is carried over (`carryover`, `--carryover`)."
    return f"there is no column {printable(name, 100)!r}; {cure} Columns are {list_columns(where, columns)}"


def _is_value(name: str, where: str) -> bool:
    """Whether a name stands where a value belongs, after a comparison: `category = toys`, `category IN (toys)`."""
    behind = rf"(?:=|<>|!=|[<>]=?|\bLIKE\b|\bIN\s*\((?:[^()]*,)?)\s*\"?{re.escape(name)}\b"
    return re.search(behind, where, re.IGNORECASE) is not None


def _format_name(name: str) -> str:
    """Write a column's name as a condition needs it; a further model's with both parts."""
    model, dot, column = name.rpartition(".")
    of_model = dot and PLAIN_NAME.fullmatch(model) and PLAIN_NAME.fullmatch(column)
    is_plain = of_model or (PLAIN_NAME.fullmatch(name) and name.lower() not in _reserved_words())
    return name if is_plain else '"' + printable(name, 100).replace('"', '""') + '"'


def _value(kind: str) -> str:
    return "'cat'" if kind.startswith("VARCHAR") else "true" if kind.startswith("BOOL") else "1"


def _quote(where: str, places: list[tuple[int, int]]) -> str:
    content = where.encode()
    for start, stop in sorted(places, reverse=True):
        content = content[:start] + b'"' + content[start:stop] + b'"' + content[stop:]
    return content.decode()


def _can_be_parsed(where: str) -> bool:
    import duckdb

    try:
        duckdb.SQLExpression(f"(\n{where}\n)")
    except duckdb.Error:
        return False
    return True


@lru_cache(maxsize=1)
def _reserved_words() -> frozenset[str]:
    import duckdb

    query = "SELECT keyword_name FROM duckdb_keywords() WHERE keyword_category IN ('reserved', 'type_function')"
    with duckdb.connect(":memory:", config={"threads": "1"}) as connection:
        return frozenset(word for (word,) in connection.execute(query).fetchall())


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
    "to_years to_months to_weeks to_days to_hours to_minutes to_seconds within"
)
WITHIN, PLACE_COLUMNS = "within", ("latitude", "longitude")
WITHIN_MACRO = """CREATE TEMP MACRO within(y, x, lat, lon, km) AS CASE WHEN y + x + lat + lon IS NOT NULL THEN
    2 * 6371.0088 * asin(sqrt(least(1, pow(sin(radians(y - lat) / 2), 2)
    + cos(radians(lat)) * cos(radians(y)) * pow(sin(radians(x - lon) / 2), 2)))) <= km END"""
"""Whether a row lies within some kilometres of a place, along a great circle of the mean radius (haversine).

Conditions give the last three; a row's own place is put before them, as a macro of DuckDB knows no columns.
"""
CALL = re.compile(rb"within\s*\(", re.IGNORECASE)
NAME = re.compile(rb"\s*'((?:[^']|'')*)'")
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
# Parts of a tree that are not expressions: literals, arguments, branches of CASE, and an ORDER BY, which must be empty.
_PLAIN_KEYS = ({"kind", "text"}, {"name", "expression"}, {"when_expr", "then_expr"}, {"path"}, {"type", "orders"})

Node = dict[str, Any]
_TURN = threading.Lock()
_TOO_MANY: Node = {"class": "TOO_MANY"}


def check_condition(where: str, columns: Mapping[str, str]) -> str:
    """Refuse a condition that does more than compare the given columns (types by name).

    Returns the condition to evaluate, with columns named like SQL keywords in double quotes. Raises `ConfigError` if it
    is too long, too deeply nested, not a single expression, or uses anything but these columns, constants and known
    functions.
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
    """Return the condition with its columns quoted, and its problem in words, or None."""
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
    return _problem_of_function(node, columns) if kind == "FUNCTION" else None


def _problem_of_type(node: Node) -> str | None:
    is_simple = all(child.get("class") == "CONSTANT" for child in node["children"])
    if node["type_name"].lower() in TYPES and is_simple and not node["schema"] and not node["catalog"]:
        return None
    return f"the type {printable(node['type_name'], 50)} is not taken here"


def _problem_of_column(path: list[str], where: str, columns: Mapping[str, str]) -> str | None:
    names, known = [name.lower() for name in path], {name.lower() for name in columns}
    if names[0] in known or (len(names) > 1 and names[0] == TABLE and names[1] in known):
        return None
    return unknown_column(".".join(path), where, columns)


def _problem_of_function(node: Node, columns: Mapping[str, str]) -> str | None:
    name, arguments = node["function_name"].lower(), node["arguments"]
    if name not in (OPERATORS if node["is_operator"] else FUNCTIONS) or node["schema"] or node["catalog"]:
        return f"the function {printable(name, 50)} is not taken here; docs/serve.md has a list of those that are"
    if node["filter"] is not None or node["distinct"] or node["export_state"]:
        return f"{name} is no aggregate here"
    if name == WITHIN and not set(PLACE_COLUMNS) <= {column.lower() for column in columns}:
        return f"{WITHIN} needs the columns {' and '.join(PLACE_COLUMNS)}"
    if name in LIKE | LIKE_ESCAPE:
        text = arguments[1]["expression"].get("literal", {}).get("text")
        # DuckDB then tries each position of a text for each `%`: three take minutes, and no interrupt is noticed.
        is_slow = text is not None and "%" in text[1:-1] and ("_" in text or name in LIKE_ESCAPE)
        if text is None or is_slow:
            return "the pattern of LIKE has to be a text; one with _ or ESCAPE has a % at its ends only"
    return None


def _nodes(tree: Node, most: int) -> Iterator[Node]:
    """Yield up to `most` nodes that are not constants; without recursion, as untrusted users choose the depth."""
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
    if isinstance(tree, dict):
        return {key: _without_places(value) for key, value in tree.items() if not key.startswith("query_location")}
    return [_without_places(each) for each in tree] if isinstance(tree, list) else tree


@lru_cache(maxsize=1)
def _bare_statements() -> Any:
    statements = _parse("true")["statements"]
    del statements[0]["node"]["where_clause"]
    return statements


def _parse(where: str) -> Node:
    """Parse a statement that is only the condition; the line breaks end a comment that would hide a parenthesis."""
    with _TURN:
        found = _connection().execute("SELECT json_serialize_sql(?)", [f"SELECT 1 WHERE (\n{where}\n)"]).fetchall()
    tree: Node = json.loads(found[0][0])
    return tree


@lru_cache(maxsize=1)
def _connection() -> "duckdb.DuckDBPyConnection":
    import duckdb

    atexit.register(_connection.cache_clear)  # else its library complains about leftovers at exit
    return duckdb.connect(":memory:", config={"threads": "1", "memory_limit": "256MB", "lock_configuration": "true"})
