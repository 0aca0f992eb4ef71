"""The one home of deltalake: read a version's files, and commit adds and removes as one version."""

import time
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from embedder.errors import StoreError
from embedder.store.files import StoreFiles
from embedder.store.journal import Part


@dataclass
class Change:
    """What one commit does to a table: part files that join it, paths that leave it."""

    adds: list[Part] = field(default_factory=list)
    removes: list[str] = field(default_factory=list)


class RecordTable:
    """One Delta table of the store."""

    def __init__(self, files: StoreFiles, name: str, version: int | None = None) -> None:
        """Open the table at a version, or at its newest; one that does not exist yet has no files.

        Raises:
            StoreError: the table or that version of it can't be read.
        """
        self.files, self.name = files, name
        try:
            self._delta: DeltaTable | None = DeltaTable(files.uri(name), version=version)
        except TableNotFoundError:
            self._delta = None
        except DeltaError as error:
            raise StoreError(
                f"{files.uri(name)}: version {version} can't be read ({error}); "
                "was the table vacuumed by another tool? Restore it, or start a new store"
            ) from None

    @property
    def exists(self) -> bool:
        """Whether anything was ever committed."""
        return self._delta is not None

    @property
    def version(self) -> int:
        """Number of the version that is open, -1 where there is none."""
        return self._delta.version() if self._delta else -1

    @property
    def schema(self) -> pa.Schema | None:
        """The table's columns, none before the first commit."""
        return pa.schema(self._delta.schema().to_arrow()) if self._delta else None

    def paths(self) -> list[str]:
        """The files of this version, relative to the table's folder, sorted."""
        if self._delta is None:
            return []
        return sorted(pa.table(self._delta.get_add_actions(flatten=True))["path"].to_pylist())

    def read(self, columns: list[str] | None = None, paths: list[str] | None = None) -> pa.Table:
        """Rows of this version.

        Args:
            columns: which, or all.
            paths: of which files, or of all.

        Raises:
            StoreError: a file of the table is missing or damaged.
        """
        tables = [self._read_file(path, columns) for path in (self.paths() if paths is None else paths)]
        return pa.concat_tables(tables) if tables else _empty(self.schema, columns)

    def _read_file(self, path: str, columns: list[str] | None) -> pa.Table:
        where = self.files.uri(f"{self.name}/{path}")
        try:
            return pq.ParquetFile(where, memory_map=True).read(columns)
        except (OSError, pa.ArrowException) as error:
            raise StoreError(
                f"{where}: a part file of version {self.version} can't be read ({error}); "
                "restore the file, or delete its items and embed them again"
            ) from None

    def check_schema(self, schema: pa.Schema) -> None:
        """Refuse rows of other columns than the table has.

        Raises:
            StoreError: the columns differ.
        """
        if self._delta is None:
            return
        has = {field.name: str(field.type) for field in self._delta.schema().fields}
        gets = {field.name: str(field.type) for field in Schema.from_arrow(schema).fields}
        differing = sorted(name for name in has.keys() | gets.keys() if has.get(name) != gets.get(name))
        if differing:
            raise StoreError(
                f"{self.files.uri(self.name)}: its columns and this run's differ in {', '.join(differing)}; carry over "
                "the same columns with the same types as before, or start another store"
            )

    def committed(self, run_id: str) -> bool:
        """Whether that run's commit is already in the table."""
        return self._delta is not None and self._delta.transaction_version(run_id) is not None

    def commit(self, run_id: str, change: Change, schema: pa.Schema) -> int:
        """Add and remove files as one version, once a run; returns the version that holds them.

        Args:
            run_id: marks the commit, so that doing it again after a crash changes nothing.
            change: what joins and what leaves.
            schema: the table's columns; makes the table where it does not exist.
        """
        if self._delta is None:
            self._delta = DeltaTable.create(self.files.uri(self.name), Schema.from_arrow(schema), mode="ignore")
        if not self.committed(run_id) and (change.adds or change.removes):
            self._delta.create_write_transaction(
                [*map(_add, change.adds), *map(_remove, change.removes)],
                mode="append",
                schema=self._delta.schema(),
                commit_properties=CommitProperties(app_transactions=[Transaction(run_id, 1)]),
            )
        self._delta.update_incremental()
        return self.version


def _add(part: Part) -> AddAction:
    return AddAction(part.path, part.size_bytes, {}, _now_ms(), True, part.stats)


def _remove(path: str) -> RemoveAction:
    return RemoveAction(path=path, deletion_timestamp=_now_ms(), data_change=True)


def _now_ms() -> int:
    return int(time.time() * 1000)


def _empty(schema: pa.Schema | None, columns: list[str] | None) -> pa.Table:
    if schema is None:
        return pa.table({name: pa.array([], pa.null()) for name in columns or []})
    return schema.empty_table().select(columns if columns is not None else schema.names)
