"""Columns of SQL conditions: quoted where SQL reads their names otherwise, and listed where one is wrong."""

import difflib
import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from itertools import combinations

from embedder.storage.printable import is_text, printable
from embedder.store.journal.part_writer import VECTOR_COLUMNS

MAX_NESTING = 30  # brackets inside one another; DuckDB takes 0.2 s to find a mistake inside them, 2 s inside 250
MAX_WORDS = 3  # of SQL that are columns of one condition; 7 ways to quote them are tried
MAX_LISTED, MAX_TYPE_CHARACTERS = 40, 60  # columns of a message, and characters of each type
PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
WORD = re.compile(rb"[A-Za-z_]+")
MODEL_COLUMN = re.compile(rb'([A-Za-z_][A-Za-z0-9_]*)\.(?:([A-Za-z_][A-Za-z0-9_]*)|"((?:[^"]|"")+)")')


def quoted_columns(where: str, columns: Collection[str]) -> str:
    """Condition with columns in double quotes that are named like words of SQL: `group = 'a'` as `"group" = 'a'`.

    So are columns of other models, which SQL would take for a table's: `labels.top = 'cat'` as `"labels.top" = 'cat'`.
    It comes back as it is where it can be parsed, or where not exactly one choice of words of SQL, each quoted wherever
    it stands, lets it be parsed. Literals, comments and quoted names stay as they are.

    Args:
        where: a SQL expression.
        columns: names of the columns that it may read.
    """
    where = _with_model_columns(where, columns)
    words = column_words(where, columns)
    if not words or len(words) > MAX_WORDS or nesting(where) > MAX_NESTING or _can_be_parsed(where):
        return where
    choices = [chosen for size in range(1, len(words) + 1) for chosen in combinations(words, size)]
    tried = [_quote(where, [place for word in chosen for place in words[word]]) for chosen in choices]
    parsed = [each for each in tried if _can_be_parsed(each)]
    return parsed[0] if len(parsed) == 1 else where


def _with_model_columns(where: str, columns: Collection[str]) -> str:
    """Condition with NAME.COLUMN in double quotes; where a column has the name NAME, COLUMN is a field of that."""
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


def nesting(where: str) -> int:
    """Most brackets that stand open at one place of a condition, those of literals and comments left out."""
    import duckdb

    content, level, most = where.encode(), 0, 0
    for start, kind in duckdb.tokenize(where):
        if kind == duckdb.token_type.operator:
            character = content[start : start + 1]
            level += (character in b"([{") - (character in b")]}")
            most = max(most, level)
    return most


def column_words(where: str, columns: Collection[str]) -> dict[str, list[tuple[int, int]]]:
    """Words of SQL in a condition that name a column, too: in lower case, with the bytes where each begins and ends."""
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
    """Second half of a message about a condition that can't be parsed: how its columns are written; may be empty."""
    words = column_words(where, columns)
    names = ", ".join(f'"{word}"' for word in words)
    return f"; a column with the name of a word of SQL stands in double quotes: {names}" if words else ""


def list_columns(where: str, columns: Mapping[str, str]) -> str:
    """Columns as they are written in conditions, with their types, and an example for one that holds lists.

    Args:
        where: the condition, whose own lists are the better example.
        columns: type of each column by its name.
    """
    shown = [f"{_format_name(name)} {printable(kind, MAX_TYPE_CHARACTERS)}" for name, kind in columns.items()]
    more = f" and {len(shown) - MAX_LISTED:,} more" if len(shown) > MAX_LISTED else ""
    lists = [name for name, kind in columns.items() if kind.endswith("]") and not kind.startswith("STRUCT")]
    asked = [name for name in lists if name.lower() in where.lower()] or lists
    hints = [
        f"; ask for a value of a list as list_contains({_format_name(name)}, {_value(columns[name])})" for name in asked
    ]
    return f"{', '.join(shown[:MAX_LISTED])}{more}{''.join(hints[:1])}"


def unknown_column(name: str, where: str, columns: Mapping[str, str]) -> str:
    """Message about a column that is not there.

    Args:
        name: of the column.
        where: the condition.
        columns: type of each column that there is, by its name.
    """
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
    """Whether a name stands where a value does, behind a comparison: `category = toys`, `category IN (toys)`."""
    behind = rf"(?:=|<>|!=|[<>]=?|\bLIKE\b|\bIN\s*\((?:[^()]*,)?)\s*\"?{re.escape(name)}\b"
    return re.search(behind, where, re.IGNORECASE) is not None


def _format_name(name: str) -> str:
    """Name of a column as conditions have it; of another model's, both parts."""
    model, dot, column = name.rpartition(".")
    of_model = dot and PLAIN_NAME.fullmatch(model) and PLAIN_NAME.fullmatch(column)
    is_plain = of_model or (PLAIN_NAME.fullmatch(name) and name.lower() not in _reserved_words())
    return name if is_plain else '"' + printable(name, 100).replace('"', '""') + '"'


def _value(kind: str) -> str:
    """Value to look for in a list of a type."""
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
    """Words that DuckDB takes for no name of a column."""
    import duckdb

    query = "SELECT keyword_name FROM duckdb_keywords() WHERE keyword_category IN ('reserved', 'type_function')"
    with duckdb.connect(":memory:", config={"threads": "1"}) as connection:
        return frozenset(word for (word,) in connection.execute(query).fetchall())
