"""Columns of a publication's other models next to the rows of one: NAME.COLUMN, null if a model has no such row."""

import hashlib
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.compat.locked_property import locked_cached_property
from embedder.storage.hashed_rows import NUMBER, HashedRows, read_parts
from embedder.storage.spill_file import GatheredRows, in_memory_or_mapped
from embedder.store.files import StoreFiles
from embedder.store.layout import MAIN, Current
from embedder.store.publish.current import versions_of
from embedder.store.schema import EMBEDDINGS, VECTOR_COLUMNS
from embedder.store.tables.tables import RecordTable
from embedder.store.tables.words import words_column
from index.vectors import Rows

KEY = ["item_id", "segment"]
TAKEN = "models."  # before NAME.COLUMN if the rows have a column of that name


@dataclass(frozen=True)
class JoinedColumn:
    """Column `name` of a model (empty for the main one), called `shown` next to the rows of another model."""

    shown: str
    model: str
    name: str


@dataclass(frozen=True)
class BesideRows:
    """Columns of a model, matched to the rows of another one.

    `places` has the row of `rows` for each row of the other model, or -1 for none.
    """

    columns: list[JoinedColumn]
    rows: GatheredRows
    places: Rows

    def append_to(self, rows: pa.Table, start: int, end: int) -> pa.Table:
        """Append the columns to a slice of the other model's rows."""
        places = self.places[start:end]
        is_there = places >= 0
        found = self.rows.take(places[is_there])
        in_found = pa.array(np.cumsum(is_there) - 1, mask=~is_there)
        for column in self.columns:
            values = found[column.name]
            values = values if is_there.all() else values.combine_chunks().take(in_found)
            rows = rows.append_column(column.shown, values)
        return rows


class ModelColumns:
    """Columns that the models of a publication give to the rows of one of them; safe for several threads.

    Carried columns are in the main model's table, under their own names.
    """

    def __init__(self, files: StoreFiles, publication: Current, model: str) -> None:
        """Choose the model whose rows get the columns (empty for the main one); tables are opened on demand."""
        self._models, self._model = versions_of(files.main, publication), model

    @property
    def is_alone(self) -> bool:
        """Whether the publication has only one model."""
        return len(self._models) == 1

    @property
    def medium_columns(self) -> tuple[str, ...]:
        """Columns of the medium, which are in the main model's table."""
        return self._models[""][1].medium_columns

    @property
    def others(self) -> str:
        """Short hash of the versions of the other models, whose columns the rows have too; empty for none."""
        versions = [[name, own.embeddings] for name, (_, own) in self._models.items() if name != self._model]
        return hashlib.sha256(json.dumps(versions).encode()).hexdigest()[:8] if versions else ""

    @locked_cached_property
    def tables(self) -> dict[str, RecordTable]:
        """Embeddings tables of all models, by name."""
        return {name: RecordTable(view, "embeddings", own.embeddings) for name, (view, own) in self._models.items()}

    @locked_cached_property
    def own(self) -> list[str]:
        """Columns of the rows' own table that keep their names; a further model's outputs are not among them."""
        names = _names(self.tables[self._model])
        if not self._model:
            return names
        hidden = {*VECTOR_COLUMNS} if self._models[self._model][1].has_vectors is False else set()
        return [name for name in names if name in EMBEDDINGS.names and name not in hidden]

    @locked_cached_property
    def joined(self) -> dict[str, JoinedColumn]:
        """Columns of the models, by their names next to the rows: carried ones, other models' vectors, outputs."""
        found: dict[str, JoinedColumn] = {}
        if self._model:
            carried = [name for name in _names(self.tables[""]) if name not in EMBEDDINGS.names]
            found |= {name: JoinedColumn(name, "", name) for name in carried}
        taken = {*self.own, *found}
        for model, (_, own) in self._models.items():
            for name in self._other_columns(model, own):
                shown = f"{model or MAIN}.{name}"
                while shown in taken:
                    shown = TAKEN + shown
                found[shown] = JoinedColumn(shown, model, name)
        return found

    def _other_columns(self, model: str, own: Current) -> Iterator[str]:
        """Yield the vectors of a model that is not the rows' own, and the outputs of a further one."""
        names = _names(self.tables[model])
        if model != self._model and own.has_vectors is not False:
            yield from (name for name in VECTOR_COLUMNS if name in names)
        if model and own.outputs is not None:
            yield from (name for name in own.outputs if name in names)

    def word_tables(self) -> Iterator[tuple[StoreFiles, RecordTable, str]]:
        """Yield view and table of each other model that gives words, and the name of these next to the rows."""
        for shown, column in self.joined.items():
            view, table = self._models[column.model][0], self.tables[column.model]
            if column.model and column.name == words_column(view, table.schema):
                yield view, table, shown

    def rows_of(self, table: RecordTable) -> Rows:
        """Return the row for each row of another model's table, or -1; int64 (rows of that table,)."""
        return match_keys(_gather(table, KEY), _gather(self.tables[self._model], KEY))

    def pieces(self, columns: Collection[str]) -> Iterator[pa.Table]:
        """Read the rows with their own columns and those of the other models, some hundred thousand rows at a time."""
        table = self.tables[self._model]
        if self.is_alone:
            yield from table.pieces(list(columns))
            return
        wanted = [name for name in dict.fromkeys(columns) if name in self.own or name in self.joined]
        others = self._join_models([self.joined[name] for name in wanted if name in self.joined])
        own = list(dict.fromkeys([*(name for name in wanted if name in self.own), *(KEY if others else ())]))
        start = 0
        for rows in chain(table.pieces(own), [table.read(own, [])]):  # the empty table has the columns, too
            end = start + rows.num_rows
            for other in others:
                rows = other.append_to(rows, start, end)  # noqa: PLW2901
            yield rows.select(wanted)
            start = end

    def _join_models(self, columns: Sequence[JoinedColumn]) -> list[BesideRows]:
        by_model: dict[str, list[JoinedColumn]] = {}
        for column in columns:
            by_model.setdefault(column.model, []).append(column)
        keys = _gather(self.tables[self._model], KEY) if by_model else None
        found = []
        for model, own in by_model.items():
            rows = _gather(self.tables[model], [*KEY, *(each.name for each in own)])
            found.append(BesideRows(own, GatheredRows(rows.drop_columns(KEY)), match_keys(keys, rows)))
        return found

    def read(self, columns: Collection[str] | None = None) -> pa.Table:
        """Read the rows with their own columns and the other models'; columns that no model has are left out."""
        if self.is_alone:
            return self.tables[self._model].read(None if columns is None else list(columns))
        return pa.concat_tables(self.pieces([*self.own, *self.joined] if columns is None else columns))


def _gather(table: RecordTable, columns: list[str]) -> pa.Table:
    empty = table.read(columns, [])
    return in_memory_or_mapped(table.pieces(columns), empty.schema)


def _names(table: RecordTable) -> list[str]:
    return list(table.schema.names) if table.schema is not None else []


def match_keys(wanted: pa.Table, known: pa.Table) -> Rows:
    """Return the row of `known` for each wanted (item_id, segment), else -1; int64 (wanted rows,).

    Large tables are matched in parts by the hash of the item ids, each in memory.
    """
    if wanted.select(KEY).equals(known.select(KEY)):  # as in a fresh index of only images
        return np.arange(known.num_rows)
    sides = [
        HashedRows((pa.Table.from_batches([batch]) for batch in each.select(KEY).to_batches()), each.select(KEY).schema)
        for each in (wanted, known)
    ]
    if all(side.num_parts == 1 for side in sides):
        return _match(wanted, known)
    found = np.full(wanted.num_rows, -1, np.int64)
    for own, theirs in read_parts(*sides):
        places = _match(own, theirs)
        is_known = places >= 0
        found[own[NUMBER].to_numpy()[is_known]] = theirs[NUMBER].to_numpy()[places[is_known]]
    return found


def _match(wanted: pa.Table, known: pa.Table) -> Rows:
    if known.num_rows == 0:
        return np.full(wanted.num_rows, -1, np.int64)
    known_keys, wanted_keys = _keys(known, known["item_id"]), _keys(wanted, known["item_id"])
    known_order, wanted_order = np.argsort(known_keys, kind="stable"), np.argsort(wanted_keys, kind="stable")
    # Both sorted, so that neighbouring keys are looked up near each other: ten times faster than in random order.
    positions = np.searchsorted(known_keys[known_order], wanted_keys[wanted_order])
    nearest = np.empty(wanted.num_rows, np.int64)
    nearest[wanted_order] = known_order[np.minimum(positions, known.num_rows - 1)]
    rows: Rows = np.where(known_keys[nearest] == wanted_keys, nearest, -1)
    return rows


def _keys(table: pa.Table, names: pa.ChunkedArray) -> Rows:
    """Return item and segment as one number; negative for an item that is not among the names."""
    item = pc.fill_null(pc.index_in(table["item_id"], value_set=names), -1).to_numpy().astype(np.int64)
    keys: Rows = (item << 32) | table["segment"].to_numpy().astype(np.int64)
    return keys
