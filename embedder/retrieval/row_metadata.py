"""What searches know of rows besides their vectors: columns of the tables, rows by id, files of the items."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.compat.locked_property import locked_cached_property
from embedder.retrieval.filters import MODIFIED, ROW, SIZE, RowFilter
from embedder.retrieval.model_columns import ModelColumns, match_keys
from embedder.retrieval.ranking import RowNumbers
from embedder.retrieval.row_files import OF_FILES, ORDER, PICTURED, RowFiles
from embedder.sources.byte_ranges import EmbeddedFile
from embedder.sources.item_ranges import ITEM_FILE, embedded_file
from embedder.storage.spill_file import GatheredRows, in_memory_or_mapped
from embedder.store.files import StoreFiles
from embedder.store.schema import EMBEDDINGS, ITEMS, VECTOR_COLUMNS, with_nulls
from embedder.store.tables.tables import RecordTable
from index.index_errors import RetrievalError
from index.vectors import Mask, Rows

OWN = ("item_id", "segment", "modality", "uri", "start_s", "end_s", "caption")  # fields of a hit, besides carryover


HAS_PICTURE = "has_picture"  # column for conditions: whether a row has the vector of an image or a video segment


class IdRows:
    """Rows of an item by its id, through binary search in sorted ids; 8 bytes per row."""

    def __init__(self, ids: pa.ChunkedArray, order: RowNumbers | None = None, mapped: RowFiles | None = None) -> None:
        """Sort the ids, which stay in place, possibly on disk; `order` has their rows in sorted order, if known.

        `mapped` are the row files that the ids lie in, if any.
        """
        self._ids, self._mapped = ids, mapped
        self._order = pc.sort_indices(ids).to_numpy().astype(np.int64) if order is None else order

    def rows(self, item_id: str) -> Rows:
        """Return the rows of one item, in their order; empty if there is no such item."""

        def id_at(position: int) -> str:
            value: str = self._ids[int(self._order[position])].as_py()
            return value

        start = bisect_left(range(len(self._order)), item_id, key=id_at)
        stop = bisect_right(range(len(self._order)), item_id, lo=start, key=id_at)
        rows: Rows = np.sort(self._order[start:stop]).astype(np.int64)
        return rows

    def values(self) -> Iterator[str]:
        """Yield the id of each row, a thousand of them in memory at once."""
        if self._mapped is not None:
            self._mapped.read_ahead()
        for start in range(0, len(self._ids), 1000):
            yield from self._ids.slice(start, 1000).to_pylist()


class RowMetadata:
    """All columns of one version of the embeddings table except the vectors: read once, then taken by row number.

    Columns of other models of the publication are added. Large columns lie in a memory-mapped temporary file, so that
    the kernel can drop pages that no search uses.
    """

    def __init__(
        self,
        models: ModelColumns,
        has_picture: Callable[[], Mask],
        files: "EmbeddedFiles",
        mapped: RowFiles | None,
    ) -> None:
        """Read the table and the columns of the other models, or take the rows from `mapped`.

        `has_picture` gives the column `HAS_PICTURE` of conditions, bool (rows,); `files` the times and sizes of the
        items' files.
        """
        self._has_picture, self._items, self._mapped = has_picture, files.read, mapped
        self._medium = models.medium_columns
        if mapped is not None:
            self._gathered = GatheredRows(mapped.rows.select(mapped.public))
            return
        joined = (name for name, each in models.joined.items() if each.name not in VECTOR_COLUMNS)
        names = [name for name in (*(models.own or OWN), *joined) if name not in VECTOR_COLUMNS]
        pieces = models.pieces(names)
        first = next(pieces, None)
        if first is None:
            first = models.read(names)
        self._gathered = GatheredRows(in_memory_or_mapped(chain([first], pieces), first.schema))

    @property
    def rows(self) -> pa.Table:
        """All rows; whoever asks for them reads whole columns."""
        if self._mapped is not None:
            self._mapped.read_ahead()
        return self._gathered.table

    def rows_of(self, ids: pa.Table, is_live: Mask) -> Rows:
        """Return the row of each vector by its `item_id` and `segment`; -1 if `is_live`, bool (vectors,), is false.

        Raises `RetrievalError` if the table lacks the item of a live vector.
        """
        found = match_keys(ids, self.rows)
        if (found[is_live] < 0).any():
            lost = ids["item_id"][int(np.flatnonzero((found < 0) & is_live)[0])].as_py()
            raise RetrievalError(
                f"the index holds {lost!r}, which the embeddings published with it lack; build the index again"
            )
        return found

    def take(self, rows: Rows, columns: Sequence[str] | None = None) -> pa.Table:
        """Return rows by number, in that order, or some of their columns; only what holds them is read."""
        return without_dictionaries(self._gathered.take(rows, columns))

    def describe(self, rows: Rows) -> list[dict[str, Any]]:
        """Return the fields of hits for some rows, in their order; those of sources under `carryover`."""
        carried = self.carried.names
        medium = [name for name in self._gathered.table.column_names if name in self._medium]
        return [
            {name: row[name] for name in OWN}
            | {"carryover": {name: row[name] for name in carried}}
            | {"medium": {name: row[name] for name in medium if row[name] not in (None, [])}}
            for row in to_rows(self.take(rows, [*OWN, *carried, *medium]))
        ]

    def texts(self, column: str, rows: Rows) -> list[str | None]:
        """Return the captions, or another column of texts, of some rows, in their order."""
        return self.take(rows, [column])[column].to_pylist()  # type: ignore[no-any-return]

    @locked_cached_property
    def carried(self) -> pa.Schema:
        """Names and types of the carried columns."""
        plain = _without_dictionaries(self._gathered.table.schema)
        return pa.schema([field for field in plain if field.name not in {*EMBEDDINGS.names, *self._medium}])

    @locked_cached_property
    def ids(self) -> IdRows:
        """Rows by the id of their item."""
        order = None if self._mapped is None else self._mapped.numbers(ORDER)
        return IdRows(self._gathered.table["item_id"], order, self._mapped)

    @locked_cached_property
    def filter(self) -> RowFilter:
        """Filter over the rows and over the items table's columns about their files.

        For conditions, `HAS_PICTURE` hides a column of the table with that name.
        """
        if self._mapped is not None:
            self._mapped.read_ahead()
            names = [ROW, *self._mapped.public]
            pictured = {PICTURED: HAS_PICTURE} if HAS_PICTURE not in names else {}
            shown = dict.fromkeys(names) | pictured | dict.fromkeys([MODIFIED, SIZE])
            columns = self._mapped.columns({name: new or name for name, new in shown.items()})
            return RowFilter(columns, is_mapped=True)
        rows = self.rows
        if HAS_PICTURE not in rows.column_names:
            rows = rows.append_column(HAS_PICTURE, pa.array(self._has_picture()))
        return RowFilter(rows, self._items)


class EmbeddedFiles:
    """What one version of the items table says about the files of its items; read on first use."""

    def __init__(self, files: StoreFiles, version: int, mapped: Callable[[], RowFiles | None] | None = None) -> None:
        """Choose the version; `mapped` gives the row files that have the same, if there are any."""
        self._files, self._version, self._mapped = files, version, mapped

    def read(self) -> pa.Table:
        """Read the columns `ITEM_FILE` of all items."""
        return self._items[0].table

    def load(self) -> None:
        """Read it now."""
        _ = self._items

    def __reduce__(self) -> tuple[Any, ...]:
        return EmbeddedFiles, (self._files, self._version)

    def of(self, item_id: str, uri: str, modality: str) -> EmbeddedFile | None:
        """Return what the local file of an item must be; None on the web and in object stores."""
        gathered, ids = self._items
        found = gathered.take(ids.rows(item_id)[:1]).to_pylist()
        item = found[0] if found else dict.fromkeys(ITEM_FILE) | {"item_id": item_id}
        return embedded_file(uri, item, is_text=modality == "text")

    @locked_cached_property
    def _items(self) -> tuple[GatheredRows, IdRows]:
        """All items, on disk if there are many, and the rows of each id; of row files those that have vectors."""
        mapped = None if self._mapped is None else self._mapped()
        if mapped is not None:
            shown = {"item_id": "item_id"} | {hidden: name for name, hidden in OF_FILES.items()}
            found = mapped.columns(shown).select(ITEM_FILE)
            return GatheredRows(found), IdRows(found["item_id"], mapped.numbers(ORDER))
        table = RecordTable(self._files, "items", self._version)
        schema = pa.schema([ITEMS.field(name) for name in ITEM_FILE])
        pieces = (with_nulls(piece, schema).select(ITEM_FILE) for piece in table.pieces(list(ITEM_FILE)))
        gathered = GatheredRows(in_memory_or_mapped(pieces, schema))
        return gathered, IdRows(gathered.table["item_id"])


def to_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Return rows as dictionaries, each value as `to_value` gives it."""
    try:
        return table.to_pylist()  # type: ignore[no-any-return]
    except OverflowError:
        columns = [[to_value(each) for each in column] for column in table.columns]
        return [dict(zip(table.column_names, values, strict=True)) for values in zip(*columns, strict=True)]


def to_value(scalar: pa.Scalar) -> Any:
    """Return a value of a column as Python's; None for a time beyond the years 1 to 9999, of which Python has none."""
    try:
        return scalar.as_py()
    except OverflowError:
        return None


def without_dictionaries(rows: pa.Table) -> pa.Table:
    """Return the rows with each dictionary-encoded column as its values."""
    return rows.cast(_without_dictionaries(rows.schema))


def _without_dictionaries(schema: pa.Schema) -> pa.Schema:
    return pa.schema([(f.name, f.type.value_type if pa.types.is_dictionary(f.type) else f.type) for f in schema])
