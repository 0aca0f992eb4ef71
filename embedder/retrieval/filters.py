"""SQL conditions over a table's rows, evaluated by a DuckDB that can read those rows and nothing else.

DuckDB scans the Arrow columns in place. On a million rows and one thread, `price < 0.0001` took 3 ms, `price < 0.1`
(a tenth of the rows) 9 ms, and `category = 'c3'` 5 ms with a dictionary-encoded column, as here, or 15 ms without.
A table of DuckDB's own, which would hold all columns twice, took 2, 9 and 17 ms.
"""

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.errors import ConfigError
from embedder.retrieval.conditions import (
    EXAMPLE,
    PLACE_COLUMNS,
    TABLE,
    WITHIN_MACRO,
    check_condition,
    list_columns,
    quoted_columns,
    unknown_column,
    words_hint,
)
from embedder.sources import uris
from embedder.storage.printable import is_text, readable
from embedder.store.schema import VECTOR_COLUMNS
from index.vectors import Among, Mask, Rows

if TYPE_CHECKING:
    import duckdb

ID, MODIFIED, SIZE = "item_id", "__modified", "__size_bytes"  # the last two come from the items table

OF_IDS = {
    "folder": "rtrim(parse_dirpath(item_id, 'forward_slash'), '/')",
    "file_name": "parse_filename(item_id, false, 'forward_slash')",
}
"""Columns computed from ids: a file's id is its path below its source's folder."""
SUFFIX = r"nullif(lower(regexp_extract({}, '\.([A-Za-z0-9]{{1,5}})$', 1, 's')), '')"
PLACE = rf"""CASE WHEN ends_with(uri, item_id) OR regexp_matches(uri, '({uris.CELL}|{uris.ROW})$') THEN item_id
    WHEN regexp_matches(uri, '{uris.MEMBER}$') THEN regexp_extract(uri, '{uris.MEMBER}$', 1)
    WHEN regexp_matches(uri, '^https?://') THEN regexp_extract(uri, '^[^?#]*')
    ELSE coalesce(uri, item_id) END"""
OF_ITEMS = {
    "file_date": f"TRY_CAST(regexp_extract({MODIFIED}, '^[^|]*Z|^[^|]*') AS TIMESTAMPTZ)",
    "file_size": f"CAST({SIZE} AS BIGINT)",
}
"""Columns computed from the items table."""


def file_columns(names: list[str]) -> dict[str, str]:
    """Return the SQL of the computed file columns; a table's own column of the same name wins."""
    taken = {name.lower() for name in names}
    file_type = {"file_type": SUFFIX.format(PLACE if "uri" in taken else ID)}
    return {name: sql for name, sql in (OF_IDS | file_type | OF_ITEMS).items() if ID in taken and name not in taken}


def with_items(rows: pa.Table, items: pa.Table) -> pa.Table:
    """Add each file's time and size to the rows; `items` has `item_id`, `modified` and `size_bytes` of each item."""
    places = pc.index_in(rows[ID], value_set=items[ID].combine_chunks())
    for name, column in ((MODIFIED, "modified"), (SIZE, "size_bytes")):
        rows = rows.append_column(name, pc.take(items[column], places))
    return rows


ROW = "__row_number"
STORED = "__rows"  # the Arrow columns; conditions read a view of them that adds the computed ones
DEADLINE_S = 30.0
REPEAT_S = 0.05
MAX_REMEMBERED_BYTES, MIN_REMEMBERED = 64 << 20, 8
# Row numbers take eight bytes each, a mask one per row of the table: few passing rows are kept as numbers.
FEW_SHARE = 8
# A text column has few values if each occurs this often, and the table has this many rows.
MIN_REPEATS, SAMPLE_ROWS = 8, 65_536
# A condition may not read files, change settings, fetch code, or use up the machine.
SETTINGS: dict[str, str | bool | int | float | list[str]] = {
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    "python_enable_replacements": "false",
    "temp_directory": "",
    "memory_limit": "1GB",
    "threads": "1",
    "lock_configuration": "true",
}


class RowFilter:
    """Filter of rows by a condition; safe for several threads, which take turns."""

    def __init__(self, rows: pa.Table, items: Callable[[], pa.Table] | None = None, *, is_mapped: bool = False) -> None:
        """Register a table's rows; `items` reads the items table, for the first condition on a file's time or size.

        Rows of row files (`is_mapped`) begin with their numbers, and have those times and sizes: they are scanned where
        they lie.
        """
        import duckdb

        self._num_rows: int = rows.num_rows
        self._connection = duckdb.connect(":memory:", config=SETTINGS)
        # First, as DuckDB renames the second of two columns with the same name.
        if is_mapped:
            self._rows, names = rows, [name for name in rows.column_names if name not in (ROW, MODIFIED, SIZE)]
        else:
            self._rows = encode_repeated(rows).add_column(0, ROW, pa.array(np.arange(rows.num_rows)))
            names = rows.column_names
        self._computed, self._items = file_columns(names), None if is_mapped else items
        self._show(self._rows, "*" if is_mapped else f"*, NULL::VARCHAR AS {MODIFIED}, NULL::BIGINT AS {SIZE}")
        types = [kind for _, kind, *_ in self._connection.execute(f"DESCRIBE {TABLE}").fetchall()[1:]]
        self._types: dict[str, str] = dict(zip([*names, *self._computed], types, strict=True))
        if set(PLACE_COLUMNS) <= {name.lower() for name in self._types}:
            self._connection.execute(WITHIN_MACRO)
        self._turn = threading.Lock()
        self._remembered: OrderedDict[str, Among | str] = OrderedDict()  # or why there is none

    @property
    def columns(self) -> dict[str, str]:
        """SQL types of the columns that a condition can read, by name."""
        return {name: kind for name, kind in self._types.items() if name not in VECTOR_COLUMNS}

    @property
    def computed(self) -> list[str]:
        """Names of the columns that are not in the table (`file_columns`)."""
        return list(self._computed)

    def read(self, names: Collection[str]) -> pa.Table:
        """Read some of `columns`, computed ones included, for all rows in their order."""
        listed = ", ".join('"' + name.replace('"', '""') + '"' for name in names)
        with self._turn:
            self._read_items(listed)
            return self._connection.sql(f"SELECT {listed} FROM {TABLE} ORDER BY {ROW}").to_arrow_table()

    def matching(self, where: str) -> Mask:
        """Return a mask, bool (rows,), of the rows that fulfil a condition; rows where it is NULL do not.

        Raises `ConfigError` if it is no expression, names an unknown column, is not boolean, or can't be evaluated.
        """
        passing = self.passing(where)
        if passing.dtype == np.bool_:
            return passing.astype(np.bool_, copy=False)
        mask = np.zeros(self._num_rows, np.bool_)
        mask[passing] = True
        return mask

    def passing(self, where: str) -> Among:
        """Return the rows that fulfil a condition; as numbers if few, so that nothing is allocated per table row.

        Raises `ConfigError` if it is no expression, names an unknown column, is not boolean, or can't be evaluated.
        """
        known = self._remembered.get(where)
        if isinstance(known, np.ndarray):
            return known
        if not is_text(where):
            raise ConfigError(f"where {readable(where)!r}: it is no UTF-8 text; {EXAMPLE}")
        with self._turn:
            return self._match(where, quoted_columns(where, self.columns), DEADLINE_S)

    def has_mask(self, where: str) -> bool:
        """Whether the result of a condition is cached."""
        return isinstance(self._remembered.get(where), np.ndarray)

    def remember(self, where: str, timeout_s: float, hidden: Collection[str] = ()) -> None:
        """Evaluate an untrusted condition in advance, so that the cost of the following searches is known.

        It may read columns, except `hidden` ones, and call harmless functions. Raises `ConfigError` if it does more
        than that, can't be evaluated, or takes longer than `timeout_s`; repeats fail at once.
        """
        visible = {name: kind for name, kind in self.columns.items() if name not in hidden}
        checked = check_condition(where, visible)
        with self._turn:
            known = self._remembered.get(where)
            if known is None:
                known = self._outcome(where, checked, timeout_s)
                self._remembered[where] = known
                if len(self._remembered) > max(MIN_REMEMBERED, MAX_REMEMBERED_BYTES // max(1, self._num_rows)):
                    self._remembered.popitem(last=False)
        if isinstance(known, str):
            raise ConfigError(known)

    def _read_items(self, text: str) -> None:
        if self._items is not None and any(name in text.lower() for name in OF_ITEMS):
            self._show(with_items(self._rows, self._items()), "*")
            self._items = None

    def _show(self, rows: pa.Table, stored: str) -> None:
        more = "".join(f", {sql} AS {name}" for name, sql in self._computed.items())
        self._connection.execute(f"DROP VIEW IF EXISTS {TABLE}")
        self._connection.unregister(STORED)
        self._connection.register(STORED, rows)
        self._connection.execute(
            f"CREATE TEMP VIEW {TABLE} AS SELECT * EXCLUDE ({MODIFIED}, {SIZE}){more} "
            f"FROM (SELECT {stored} FROM {STORED})"
        )

    def _outcome(self, where: str, checked: str, timeout_s: float) -> Among | str:
        try:
            passing = self._match(where, checked, timeout_s)
        except ConfigError as error:
            return str(error)
        passing.flags.writeable = False
        return passing

    def _match(self, where: str, quoted: str, timeout_s: float) -> Among:
        """Evaluate the condition `quoted`; error messages show `where`, the text as it was given."""
        import duckdb

        self._read_items(quoted)
        with self._interrupted_after(timeout_s):
            try:
                _check_expression(quoted)
                self._check_boolean(where, quoted)
                rows = self._evaluate(quoted)
            except duckdb.Error as error:
                raise self._problem(where, error, timeout_s) from None
        if len(rows) * FEW_SHARE < self._num_rows:
            return rows
        mask = np.zeros(self._num_rows, np.bool_)
        mask[rows] = True
        return mask

    @contextmanager
    def _interrupted_after(self, timeout_s: float) -> Iterator[None]:
        """Interrupt the connection after some time, repeatedly, as an interrupt between two statements is lost."""
        ended = threading.Event()

        def watch() -> None:
            wait_s = timeout_s
            while not ended.wait(wait_s):
                self._connection.interrupt()
                wait_s = REPEAT_S

        watcher = threading.Thread(target=watch, name="condition-deadline", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()

    def _check_boolean(self, where: str, quoted: str) -> None:
        types = [str(each) for each in self._connection.sql(f"SELECT (\n{quoted}\n) FROM {TABLE}").types]
        if len(types) != 1 or types[0] not in ("BOOLEAN", '"NULL"'):
            raise ConfigError(f"where {where!r}: it gives {', '.join(types)}; it must give BOOLEAN: {EXAMPLE}")

    def _evaluate(self, where: str) -> Rows:
        # The line breaks end a comment, which would hide the parenthesis.
        found = self._connection.execute(f"SELECT {ROW} FROM {TABLE} WHERE (\n{where}\n)").fetchnumpy()
        return np.sort(np.asarray(found[ROW], np.int64))

    def _problem(self, where: str, error: "duckdb.Error", timeout_s: float) -> ConfigError:
        import duckdb

        if isinstance(error, duckdb.InterruptException):
            return ConfigError(f"where {where!r}: not evaluated within {timeout_s:g} s; {EXAMPLE}")
        unknown = re.search(r'Referenced (column|table) "(.+?)" not found', str(error))
        if unknown is not None:
            name = unknown[2]
            if unknown[1] == "table" and (whole := re.search(rf"\b{re.escape(name)}\.\w+", where, re.IGNORECASE)):
                name = whole[0]
            return ConfigError(f"where {where!r}: {unknown_column(name, where, self.columns)}")
        reason = str(error).splitlines()[0].strip()
        hint = words_hint(where, self.columns) if isinstance(error, duckdb.ParserException) else ""
        listed = list_columns(where, self.columns)
        return ConfigError(f"where {where!r}: {reason}{hint}; {EXAMPLE}; columns are {listed}")


def encode_repeated(rows: pa.Table, names: Collection[str] | None = None) -> pa.Table:
    """Dictionary-encode text columns with few values, so that a condition is evaluated per value, not per row.

    Only those in `names`; None means all.
    """
    for position, (name, column) in enumerate(zip(rows.column_names, rows.columns, strict=True)):
        if pa.types.is_string(column.type) and (names is None or name in names):
            step = max(1, len(column) // SAMPLE_ROWS)
            sample = column.take(pa.array(np.arange(0, len(column), step))) if step > 1 else column
            if len(pc.unique(sample)) * MIN_REPEATS <= len(sample):
                encoded = column.dictionary_encode()
                num_values = max((len(chunk.dictionary) for chunk in encoded.chunks), default=0)
                if num_values * MIN_REPEATS <= len(column):
                    rows = rows.set_column(position, name, encoded)
    return rows


def _check_expression(where: str) -> None:
    """Refuse text that is not an expression: it must parse both as it is and in parentheses.

    The first refuses `true) UNION SELECT (...`; the second `true, false`, `x AS y` and anything after an expression.
    """
    import duckdb

    duckdb.SQLExpression(where)
    duckdb.SQLExpression(f"(\n{where}\n)")
