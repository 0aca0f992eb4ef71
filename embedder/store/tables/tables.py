"""Access to Delta tables: reads a version's files, and commits adds and removes as one version."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

import numpy as np
import pyarrow as pa

from embedder.errors import StoreError
from embedder.storage.vector_pages import Place, VectorColumn, is_laid_out, split_columns
from embedder.store.files import StoreFiles
from embedder.store.part_file import PartFile
from embedder.store.schema import TABLES, with_nulls
from embedder.store.tables.deletion_vectors import (
    DeletionVector,
    files_of,
    has_feature,
    live_rows,
    marked_rows,
    vector_of,
    with_feature,
    with_property,
)
from embedder.store.tables.delta_log import Action, columns_entry, commit_entry, entry_file, put_checkpoint, table_entry
from embedder.store.tables.delta_state import LogError, TableState, advance, read_state
from index.vectors import Floats, Mask, Rows
from shards.file_schema import parse_json

ROWS_PER_PIECE = 100_000
FILES_AT_ONCE = 1000
VECTOR_FILES_AT_ONCE = 4
"""Part files whose vectors are fetched from a bucket ahead of their use; each has at most some 150 MB."""


class RecordTable:
    """Delta table of the store."""

    def __init__(self, files: StoreFiles, name: str, version: int | None = None) -> None:
        """Open a version (-1: before the first, without files; None: the newest); StoreError if unreadable."""
        self.files, self.name = files, name
        self._state = None if version == -1 else self._read_state(version)

    def _read_state(self, version: int | None = None) -> TableState | None:
        try:
            state = read_state(self.files, self.name, version)
        except LogError as error:
            raise self._unreadable(version, error) from None
        if state is None and version is not None:  # its log entries are gone; an empty table would be wrong
            raise self._unreadable(version, "it has no log")
        return state

    def _unreadable(self, version: int | None, error: Exception | str) -> StoreError:
        return StoreError(
            f"{self.files.uri(self.name)}: version {version} can't be read ({error}); "
            "was the table vacuumed by another tool? Restore it, or start a new store"
        )

    @property
    def version(self) -> int:
        """Number of the open version, -1 if there is none."""
        return self._state.version if self._state else -1

    @property
    def schema(self) -> pa.Schema | None:
        """Columns of the table, None before the first commit."""
        return self._state.schema if self._state else None

    @property
    def _adds(self) -> dict[str, Action]:
        return self._state.adds if self._state else {}

    def paths(self) -> list[str]:
        """Return the files of this version, relative to the table's folder, sorted."""
        return sorted(self._adds)

    def needed_files(self) -> set[str]:
        """Return all files that this version needs, relative to the table's folder: also those of deletion vectors."""
        return {path for add in self._adds.values() for path in files_of(self.name, add)}

    def num_rows(self) -> int:
        """Return the number of rows of this version, by its log."""
        return sum(each.num_rows for each in self.parts())

    def size_bytes(self, paths: Collection[str]) -> int:
        """Return the size of some files of this version, by its log."""
        return sum(add["size"] for path, add in self._adds.items() if path in paths)

    def parts(self) -> list[PartFile]:
        """Return the files of this version with rows, bytes and statistics, by path."""
        return [_part(self.name, self._adds[path]) for path in self.paths()]

    def read(self, columns: list[str] | None = None, paths: list[str] | None = None) -> pa.Table:
        """Read rows of some columns and files (None: all); StoreError if a file is missing or damaged."""
        paths = self.paths() if paths is None else paths
        starts = range(0, len(paths), FILES_AT_ONCE)
        tables = [self._read_files(paths[start : start + FILES_AT_ONCE], columns) for start in starts]
        if tables:
            return pa.concat_tables(tables)
        schema = self.schema
        if schema is None:
            return pa.table({name: pa.array([], pa.null()) for name in columns or []})
        return schema.empty_table().select(schema.names if columns is None else columns)

    def _read_files(self, paths: list[str], columns: list[str] | None) -> pa.Table:
        """Read rows of some files, merged into one chunk if many have few rows: a one-row table takes 20 kB."""
        schema = self._read_schema(columns)
        rows = pa.concat_tables(self.files.each(lambda path: self._read_file(path, columns, schema), paths))
        return rows.combine_chunks() if len(paths) == FILES_AT_ONCE and rows.num_rows < ROWS_PER_PIECE else rows

    def pieces(self, columns: list[str]) -> Iterator[pa.Table]:
        """Read rows, some hundred thousand at a time; StoreError if a file is missing or damaged."""
        return (self.read(columns, paths) for paths in self.path_pieces())

    def path_pieces(self) -> Iterator[list[str]]:
        """Yield the files in order, those of some hundred thousand rows at a time."""
        paths, num_rows = list[str](), 0
        for part in self.parts():
            paths.append(part.path)
            num_rows += part.num_rows
            if num_rows >= ROWS_PER_PIECE:
                yield paths
                paths, num_rows = [], 0
        if paths:
            yield paths

    def read_vectors(self, column: str, paths: Sequence[str] | None = None) -> VectorColumn:
        """Read the vectors of some files (None: all) into one matrix, in the order of files and rows.

        Raises StoreError if a file is missing or damaged, or has vectors of another length than the others.
        """
        paths = self.paths() if paths is None else paths
        parts = [self._part_of(path) for path in paths]
        most = [0 if part is None else max(0, part.num_rows - (part.num_null(column) or 0)) for part in parts]
        matrix = _Matrix(most)

        def read(number: int) -> VectorColumn:
            return self._read_vectors(paths[number], column, matrix.place_of(number))

        blocks = self.files.each(read, range(len(paths)), VECTOR_FILES_AT_ONCE)
        widths = {block.values.shape[1]: path for path, block in zip(paths, blocks, strict=True) if len(block.values)}
        if len(widths) > 1:
            found = ", ".join(f"{width} in {self.name}/{path}" for width, path in sorted(widths.items()))
            raise StoreError(
                f"store {self.files.address}: its vectors have different lengths: {found}; delete the items of one of "
                "them, and embed them again"
            )
        present = np.concatenate([np.zeros(0, np.bool_), *(block.present for block in blocks)])
        return VectorColumn(matrix.join([block.values for block in blocks]), present)

    def vector_blocks(self, column: str, paths: Sequence[str] | None = None) -> Iterator[VectorColumn]:
        """Read the vectors of one file after another (None: all); of a bucket, a few are fetched ahead.

        Of a file on a disk they may lie in the mapped file: use them and let them go. Raises StoreError as
        `read_vectors` does, but lengths are not compared.
        """
        paths = self.paths() if paths is None else paths
        return self.files.read_ahead(lambda path: self._read_vectors(path, column), paths, VECTOR_FILES_AT_ONCE)

    def read_with_vector(self, columns: list[str], vector: str, path: str) -> pa.Table:
        """Read columns of those rows of one file that have a vector in the column `vector`; StoreError as `read`."""
        rows, part = self.read(columns, [path]), self._part_of(path)
        if part is not None and part.num_null(vector) == 0:
            return rows
        return rows.filter(pa.array(self._read_vectors(path, vector).present))

    def _part_of(self, path: str) -> PartFile | None:
        return _part(self.name, self._adds[path]) if path in self._adds else None

    def _read_vectors(self, path: str, column: str, place: Place | None = None) -> VectorColumn:
        """Read the vectors of one file's rows; a footer that has lost rows or the column differs from the log."""
        part, mask = self._part_of(path), self._live_rows(path)
        with self._named_errors(path):
            found = self.files.read_vectors(f"{self.name}/{path}", column, place if mask is None else None)
            if part is None:
                return found
            num_null = part.null_counts.get(column)
            num_vectors = part.num_stored - (num_null or 0)
            is_lost = num_vectors and num_null is not None and not len(found.values)
            if len(found.present) != part.num_stored or is_lost:
                raise pa.ArrowInvalid(
                    f"it has {len(found.values):,} vectors in {len(found.present):,} rows, and the log says "
                    f"{num_vectors:,} in {part.num_stored:,}"
                )
        return found if mask is None else _select(found, mask, place)

    def _read_schema(self, columns: list[str] | None) -> pa.Schema:
        """Return the types of columns (None: all) as they are read, including those that an older file lacks."""
        own, there = TABLES[self.name], self.schema if self.schema is not None else pa.schema([])
        wanted = [name for name in (there.names if columns is None else columns) if name in there.names]
        return pa.schema([own.field(name) if name in own.names else there.field(name) for name in wanted])

    def _read_file(self, path: str, columns: list[str] | None, schema: pa.Schema) -> pa.Table:
        """Read the rows of a file that are in this version: all if it doesn't have the file."""
        rows, mask = self._read_stored(path, columns, schema), self._live_rows(path)
        if mask is None:
            return rows
        if len(mask) != rows.num_rows:
            raise StoreError(
                f"{self.files.uri(f'{self.name}/{path}')}: {rows.num_rows:,} rows, and the log says {len(mask):,}, of "
                "which some have left; restore the file from a backup, or go back with `embedder rollback`"
            )
        return rows.filter(pa.array(mask)) if rows.num_columns else rows.slice(0, int(mask.sum()))

    def read_stored(self, path: str, columns: list[str]) -> pa.Table:
        """Read all rows of a file, also those that have left this version; StoreError as for `read`."""
        return self._read_stored(path, columns, self._read_schema(columns))

    def marked_rows(self, path: str) -> Rows | None:
        """Return the rows of a file that have left this version by its deletion vector; None if it has none."""
        add = self._adds.get(path, {})
        vector = vector_of(add)
        if vector is None:
            return None
        return marked_rows(self.files, self.name, vector, parse_json(add["stats"])["numRecords"])

    def _live_rows(self, path: str) -> Mask | None:
        marked = self.marked_rows(path)
        return None if marked is None else live_rows(marked, parse_json(self._adds[path]["stats"])["numRecords"])

    def _read_stored(self, path: str, columns: list[str] | None, schema: pa.Schema) -> pa.Table:
        with self._named_errors(path):
            content = self.files.read_table(f"{self.name}/{path}", columns)
        found = with_nulls(content, schema)
        others = [name for name in found.column_names if name not in schema.names]  # of a table without a version yet
        return found.select([*schema.names, *others])  # files of earlier releases have another order

    @contextmanager
    def _named_errors(self, path: str) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowException, ValueError) as error:  # ValueError: a column's name is damaged
            raise StoreError(
                f"{self.files.uri(self.name)}/{path}: a part file of version {self.version} can't be read ({error}); "
                "restore the file, or delete its items and embed them again"
            ) from None

    def is_laid_out(self, path: str, columns: Collection[str]) -> bool:
        """Return whether a file has vectors in pages that are read as they lie; StoreError if it is damaged."""
        with self._named_errors(path), self.files.open(f"{self.name}/{path}") as file:
            return is_laid_out(file, columns)

    def split_columns(self, path: str, columns: Collection[str]) -> list[str]:
        """Return those of some columns that a file has byte by byte; StoreError if it is damaged."""
        with self._named_errors(path), self.files.open(f"{self.name}/{path}") as file:
            return split_columns(file, columns)

    def check_schema(self, schema: pa.Schema) -> None:
        """Raise StoreError if the columns differ from the table's."""
        if self._state is None:
            return
        from deltalake import Schema

        has, gets = (
            {field.name: str(field.type) for field in Schema.from_arrow(each).fields}
            for each in (self._state.schema, schema)
        )
        differing = sorted(name for name in has.keys() | gets.keys() if has.get(name) != gets.get(name))
        if differing:
            raise StoreError(
                f"{self.files.uri(self.name)}: its columns and this run's differ in {', '.join(differing)}; carry over "
                "the same columns with the same types as before, or start another store"
            )

    @property
    def has_deletion_vectors(self) -> bool:
        """Whether the table's readers have to know deletion vectors, as some commit brought one."""
        return self._state is not None and has_feature(self._state.protocol)

    def is_committed(self, run_id: str) -> bool:
        """Return whether the run's commit is already in the table."""
        return self._state is not None and run_id in self._state.transactions

    def commit_files(
        self, mark: str, wanted: Sequence[PartFile], schema: pa.Schema | None = None, session: str = ""
    ) -> int:
        """Make the newest version hold exactly these files; return its number.

        The entry is the difference from the preceding version, and is written if no other entry took its number. So a
        version holds what it should, whatever an overtaken writer has committed or an unfinished operation has left.
        `mark` is the run id; the entry carries it and `session`. `wanted` files may come from any version or run.
        `schema` is for a table that doesn't exist yet. Raises LeaseLostError if another run has taken over the store.
        """
        schema = schema if schema is not None else self.schema if self.schema is not None else TABLES[self.name]
        kept = {part.path: part.deletion_vector for part in wanted}
        while True:
            if self._state is None:
                self._put_entry(0, table_entry(schema))
                continue
            held = {path: vector_of(add) for path, add in self._adds.items()}
            if held == kept:
                return self.version
            now_ms = int(self.files.environment.now().timestamp() * 1000)
            adds = [_add(part, now_ms) for part in wanted if held.get(part.path, False) != part.deletion_vector]
            left = {path: vector for path, vector in sorted(held.items()) if kept.get(path, False) != vector}
            removes = [_remove(path, vector, now_ms) for path, vector in left.items()]
            upgrade = self._upgrade() if any(part.deletion_vector for part in wanted) else []
            number, actions = self.version + 1, [*upgrade, *adds, *removes]
            if self._put_entry(number, commit_entry(mark, session, now_ms, actions)) and number % 100 == 0:
                self.write_checkpoint()

    def _upgrade(self) -> list[Action]:
        """Return the actions by which readers have to know deletion vectors from then on; none if they have to."""
        if self._state is None or self.has_deletion_vectors:
            return []
        protocol, metadata = with_feature(self._state.protocol), with_property(self._state.metadata)
        return [{"protocol": protocol}, {"metaData": metadata}]

    def _put_entry(self, number: int, data: bytes) -> bool:
        """Write a log entry unless its number is taken, and read the one that is then there."""
        self.files.confirm_lease()
        is_new = self.files.create(entry_file(self.name, number), data)
        try:
            self._state = advance(self._state, self.files.read(entry_file(self.name, number)) if not is_new else data)
        except LogError as error:
            raise self._unreadable(number, error) from None
        return is_new

    def write_checkpoint(self) -> None:
        """Write the newest version whole, so that its readers need no earlier log entry."""
        if self._state is not None:
            self.files.confirm_lease()
            put_checkpoint(self.files, self.name, self.version)

    def add_columns(self, schema: pa.Schema) -> None:
        """Add missing columns to an existing table; its rows have nulls there."""
        while self._state is not None:
            lacking = [field for field in schema if field.name not in self._state.schema.names]
            if not lacking:
                return
            whole = pa.schema([*self._state.schema, *lacking])
            self._put_entry(
                self.version + 1, columns_entry(self.files, self.name, self.version, whole, self._state.protocol)
            )


def _select(column: VectorColumn, mask: Mask, place: Place | None) -> VectorColumn:
    """Return the vectors of some rows of a file, in memory that `place` gives."""
    values = column.values[mask[column.present]]
    if place is not None:
        own = place(*values.shape)
        own[:] = values
        values = own
    return VectorColumn(values, column.present[mask])


class _Matrix:
    """One matrix for the vectors of several files, each read to its place."""

    def __init__(self, most: Sequence[int]) -> None:
        """Plan the places, by how many vectors each file has at most."""
        self._ends = np.cumsum([0, *most])
        self._lock = Lock()
        self._whole: Floats | None = None

    def place_of(self, number: int) -> Place:
        """Return what gives the memory for a file: of the matrix, unless the file has more than was planned."""

        def place(num: int, width: int) -> Floats:
            start, stop = self._ends[number : number + 2]
            with self._lock:
                if self._whole is None and width:
                    self._whole = np.empty((self._ends[-1], width), np.float32)
            if self._whole is None or width != self._whole.shape[1] or num > stop - start:
                return np.empty((num, width), np.float32)
            return self._whole[start : start + num]

        return place

    def join(self, blocks: Sequence[Floats]) -> Floats:
        """Return the vectors of all files in one matrix, without a copy if each file has as many as was planned."""
        full = [block for block in blocks if len(block)]
        if self._whole is None or not all(block.base is self._whole for block in full):
            return np.concatenate(full) if full else np.empty((0, 0), np.float32)
        stop = 0
        for planned, block in zip(self._ends[:-1], blocks, strict=True):
            start, stop = stop, stop + len(block)
            if start != planned:
                self._whole[start:stop] = block
        return self._whole[:stop]


def _part(table: str, add: Action) -> PartFile:
    vector = vector_of(add)
    num_rows = parse_json(add["stats"])["numRecords"] - (vector.cardinality if vector is not None else 0)
    fields = {"path": add["path"], "num_rows": num_rows, "size_bytes": add["size"], "stats": add["stats"]}
    return PartFile(table=table, session="", deletion_vector=vector, **fields)


def _remove(path: str, vector: DeletionVector | None, now_ms: int) -> Action:
    own = {} if vector is None else {"deletionVector": vector.action()}
    return {"remove": {"path": path, "deletionTimestamp": now_ms, "dataChange": True} | own}


def _add(part: PartFile, now_ms: int) -> Action:
    fields = {"size": part.size_bytes, "modificationTime": now_ms, "dataChange": True, "stats": part.stats}
    vector = {} if part.deletion_vector is None else {"deletionVector": part.deletion_vector.action()}
    return {"add": {"path": part.path, "partitionValues": {}} | fields | vector}
