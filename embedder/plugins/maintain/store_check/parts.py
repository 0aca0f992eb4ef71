"""Checks part files of a published version: each exists as the log says and can be read; collects their rows' keys."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from embedder.plugins.maintain.store_check.findings import Finding, Unreadable, attempt, format_names
from embedder.plugins.maintain.store_check.scope import CheckedModel
from embedder.storage.hashed_rows import HashedRows
from embedder.store.files import StoreFiles
from embedder.store.part_file import PartFile
from embedder.store.schema import VECTOR_COLUMNS, with_nulls
from embedder.store.tables.deletion_vectors import DeletionVectorError, live_rows, marked_rows
from embedder.store.tables.item_rows import RECORD_KEYS, ROW_KEYS
from embedder.store.tables.tables import RecordTable

KEYS = {"items": RECORD_KEYS, "embeddings": ROW_KEYS}
NUM_WHOLE = 4
"""Part files that are read whole in parallel; each has at most 64 MiB and needs about four times its size in memory."""
NUM_KEYS = 16
KEY_BYTES = 32 << 20
"""Bytes of a table's keys that stay in memory, some hundred thousand keys: grouping them takes ten times as much."""

Counts = dict[str, int]


@dataclass(frozen=True)
class PartContent:
    """Content of one part file.

    Attributes:
        keys: `KEYS` of its rows.
        num_valid: rows with a value, by requested column; without columns for which this is unknown.
        widths: widths of the vectors, by column; only if the file was read whole.
        num_not_finite: rows with a vector that has NaN or infinity; likewise.
        models: fingerprints of the models of its rows; likewise.
    """

    keys: pa.Table
    num_valid: Counts
    widths: dict[str, set[int]] = field(default_factory=dict)
    num_not_finite: int = 0
    models: frozenset[str | None] = frozenset()


@dataclass
class TableContent:
    """Content of a published version of a table, added up.

    `keys` are the `KEYS` of its rows; `num_rows` comes from the log; `states` counts items by state. `num_valid` counts
    rows with a value by requested column, without columns for which no file says it. `is_whole` is whether everything
    was read.
    """

    keys: HashedRows
    num_parts: int = 0
    size_bytes: int = 0
    num_rows: int = 0
    states: Counter[str] = field(default_factory=Counter)
    num_valid: Counts = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    is_whole: bool = False


class WayBack:
    """Command that publishes again what was published before some part files were added."""

    def __init__(self, model: CheckedModel, earlier: Sequence[tuple[str, Any]]) -> None:
        """Keep the damaged model, and its part of readable earlier publications with their run ids, newest first."""
        self._model, self._earlier = model, earlier

    def cure(self, table: str, damaged: Sequence[str]) -> str:
        """Return the remedy for missing or damaged part files, each by its path, or by the place of its vector."""
        restore = f"restore the {'file' if len(damaged) == 1 else 'files'} from a backup"
        for run_id, version in self._earlier:
            held = attempt(lambda: RecordTable(self._model.files, table, getattr(version, table)).parts())  # noqa: B023
            if not isinstance(held, Unreadable) and not _places(held).intersection(damaged):
                command = f"embedder rollback {run_id} {self._model.files.main.option}"
                return f"{restore}, or go back with `{command}`, and release and refresh"
        return f"{restore}, or embed into a new store"


def _places(parts: Sequence[PartFile]) -> set[str]:
    vectors = (part.deletion_vector for part in parts)
    return {part.path for part in parts} | {vector.value for vector in vectors if vector is not None}


def check_table(
    model: CheckedModel, table: str, way_back: WayBack, counted_columns: Sequence[str] = (), *, deep: bool
) -> TableContent:
    """Check the part files of a published version of a table, and read the keys of its rows."""
    found = TableContent(HashedRows((), KEYS[table]))
    version = getattr(model.current, table)
    parts = attempt(lambda: RecordTable(model.files, table, version).parts())
    if isinstance(parts, Unreadable):
        rule = "the log of the table names the published version, with the rows of each part file"
        cure = way_back.cure(table, ())
        found.findings.append(Finding("error", model.place(table), parts.reason, rule, cure))
        return found
    found.num_parts, found.num_rows = len(parts), sum(part.num_rows for part in parts)
    found.size_bytes = sum(part.size_bytes for part in parts)
    there = _present(model, table, parts, found, way_back)
    found.is_whole = len(there) == len(parts)
    rows = _read(model, there, found, way_back, counted_columns, deep=deep)
    found.keys = HashedRows(rows, KEYS[table], memory_bytes=KEY_BYTES)
    return found


def _present(
    model: CheckedModel, table: str, parts: Sequence[PartFile], found: TableContent, way_back: WayBack
) -> list[PartFile]:
    """Return the part files that exist with the size in the log; add findings on the others."""
    sizes = model.sizes_below(table)
    missing = [each for each in parts if each.path not in sizes and not model.files.exists(f"{table}/{each.path}")]
    gone = {each.path for each in missing}
    cut = [each for each in parts if each.path in sizes and sizes[each.path] != each.size_bytes]
    doomed = [each for each in parts if f"{table}/{each.path}" in model.doomed]
    rule = "each part file of the published version is there, in the size that the log names"
    if missing:
        found.findings.append(_of_parts(model, missing, "missing", rule, way_back))
    if cut:
        what = f"not of the size that the log names ({sizes[cut[0].path]:,} bytes, not {cut[0].size_bytes:,})"
        found.findings.append(_of_parts(model, cut, what, rule, way_back))
    if doomed:
        finding = _of_parts(model, doomed, "listed in deletions/", "nothing that is published is to go", way_back)
        found.findings.append(finding)
    return [each for each in parts if each.path not in gone | {part.path for part in cut}]


def _of_parts(
    model: CheckedModel,
    parts: Sequence[PartFile],
    what: str,
    rule: str,
    way_back: WayBack,
    damaged: Sequence[str] | None = None,
) -> Finding:
    """Finding on part files; `damaged` is what a way back must do without, by default these files."""
    table, paths = parts[0].table, [part.path for part in parts]
    cure = way_back.cure(table, paths if damaged is None else damaged)
    if len(parts) == 1:
        return Finding("error", model.place(f"{table}/{paths[0]}"), what, rule, cure)
    return Finding("error", model.place(table), f"{len(paths):,} part files {what}: {format_names(paths)}", rule, cure)


def _read(
    model: CheckedModel,
    parts: Sequence[PartFile],
    found: TableContent,
    way_back: WayBack,
    counted_columns: Sequence[str],
    *,
    deep: bool,
) -> Iterator[pa.Table]:
    """Read part files, a few in parallel; yield the keys of their rows, and add up the rest."""
    faults = _Faults(None if model.info is None else model.info.model_fingerprint)
    num_valid: dict[str, int | None] = dict.fromkeys(counted_columns, 0)

    def read(part: PartFile) -> PartContent | Unreadable:
        return attempt(lambda: read_part(model.files, part, counted_columns, deep=deep))

    for part, content in zip(parts, model.files.stream(read, parts, NUM_WHOLE if deep else NUM_KEYS), strict=True):
        faults.add(part, content)
        if isinstance(content, Unreadable):
            continue
        for name, number in num_valid.items():
            own = content.num_valid.get(name)
            num_valid[name] = None if own is None or number is None else number + own
        if part.table == "items":
            found.states.update(dict(zip(*_counts(content.keys["state"]), strict=True)))
        yield content.keys
    found.is_whole = found.is_whole and not faults.unreadable
    found.num_valid = {name: number for name, number in num_valid.items() if number is not None}
    found.findings += faults.findings(model, way_back)


@dataclass
class _Faults:
    """Part files whose content breaks a rule.

    Attributes:
        fingerprint: of the model that rows must be of; None if it is unknown.
        unreadable: files that can't be read or lack rows, each with the reason.
        damaged: their paths; for one of which only the deletion vector is damaged, the place of that.
        widths: paths of the files by the width of their vectors; more than one width breaks the rule.
        not_finite: files with vectors that have NaN or infinity.
        foreign: files with rows of another model.
    """

    fingerprint: str | None
    unreadable: list[tuple[PartFile, str]] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    widths: dict[int, list[str]] = field(default_factory=dict)
    not_finite: list[PartFile] = field(default_factory=list)
    foreign: list[PartFile] = field(default_factory=list)

    def add(self, part: PartFile, content: PartContent | Unreadable) -> None:
        """Judge one part file."""
        if isinstance(content, Unreadable):
            self._add_unreadable(part, content.reason, of_vector=isinstance(content.mistake, DeletionVectorError))
            return
        num_rows = content.keys.num_rows
        if num_rows != part.num_rows:
            self._add_unreadable(part, f"it has {num_rows:,} rows, not {part.num_rows:,} as the log says")
        for width in set().union(*content.widths.values()):
            self.widths.setdefault(width, []).append(part.path)
        if content.num_not_finite:
            self.not_finite.append(part)
        if self.fingerprint is not None and content.models - {self.fingerprint}:
            self.foreign.append(part)

    def _add_unreadable(self, part: PartFile, reason: str, *, of_vector: bool = False) -> None:
        self.unreadable.append((part, reason))
        vector = part.deletion_vector if of_vector else None
        self.damaged.append(part.path if vector is None else vector.value)

    def findings(self, model: CheckedModel, way_back: WayBack) -> Iterator[Finding]:
        """Yield a finding for each rule that is broken."""
        if self.unreadable:
            what = f"damaged ({self.unreadable[0][1]})"
            rule = "each part file can be read, and has the rows that the log names"
            yield _of_parts(model, [part for part, _ in self.unreadable], what, rule, way_back, self.damaged)
        if len(self.widths) > 1:
            widths = ", ".join(f"{width} in {format_names(paths)}" for width, paths in sorted(self.widths.items()))
            rule = "all vectors of a model are of one width"
            cure = way_back.cure("embeddings", min(self.widths.values(), key=len))
            yield Finding("error", model.place("embeddings"), f"widths {widths}", rule, cure)
        if self.not_finite:
            rule = "each value of a vector is a finite number"
            yield _of_parts(model, self.not_finite, "with vectors that have NaN or infinity", rule, way_back)
        if self.foreign:
            rule = "all rows are of the model that CURRENT.json names, as vectors of two can't be compared"
            yield _of_parts(model, self.foreign, "with rows of another model", rule, way_back)


def _counts(column: pa.ChunkedArray) -> tuple[list[str], list[int]]:
    counts = pc.value_counts(column).to_pylist()
    return [str(each["values"]) for each in counts], [each["counts"] for each in counts]


def read_part(files: StoreFiles, part: PartFile, counted_columns: Sequence[str], *, deep: bool) -> PartContent:
    """Read the keys of a part file's rows, or all of it."""
    path, schema, vector = f"{part.table}/{part.path}", KEYS[part.table], part.deletion_vector
    content = files.read_table(path, None if deep else [*schema.names, *(counted_columns if vector else ())])
    if vector is not None:
        if content.num_rows != part.num_stored:
            raise ValueError(f"it has {content.num_rows:,} rows, not {part.num_stored:,} as the log says")
        marked = marked_rows(files, part.table, vector, part.num_stored)
        content = content.filter(pa.array(live_rows(marked, part.num_stored)))
    if lacking := {"item_id"} - set(content.column_names):
        raise ValueError(f"it has no column {', '.join(lacking)}")
    keys = with_nulls(content, schema).select(schema.names).cast(schema)
    if not deep and vector is None:
        metadata = pq.ParquetFile(files.open(path)).metadata if counted_columns else None
        return PartContent(
            keys, {name: num for name in counted_columns if (num := num_valid(metadata, name)) is not None}
        )
    valid = {
        name: content.num_rows - content[name].null_count for name in counted_columns if name in content.column_names
    }
    vectors = {name: content[name].drop_null() for name in VECTOR_COLUMNS if name in content.column_names}
    return PartContent(
        keys,
        valid,
        widths={name: set(pc.unique(pc.list_value_length(each)).to_pylist()) for name, each in vectors.items()},
        num_not_finite=sum(map(num_not_finite, vectors.values())),
        models=frozenset(pc.unique(content["model_fingerprint"]).to_pylist())
        if "model_fingerprint" in content.column_names
        else frozenset(),
    )


def num_not_finite(vectors: pa.ChunkedArray) -> int:
    """Count the values that are NaN, infinite or null in vectors that are not null."""
    chunks = (chunk.flatten().to_numpy(zero_copy_only=False) for chunk in vectors.chunks)
    return sum(int(len(values) - np.count_nonzero(np.isfinite(values))) for values in chunks)


def num_valid(metadata: pq.FileMetaData, column: str) -> int | None:
    """Count a column's non-null rows by statistics, None if unknown; a null vector counts as one null value."""
    number = int(metadata.num_rows)
    for each in range(metadata.num_row_groups):
        group = metadata.row_group(each)
        chunks = [group.column(place) for place in range(group.num_columns)]
        own = [chunk.statistics for chunk in chunks if chunk.path_in_schema.partition(".")[0] == column]
        if not own:
            number -= int(group.num_rows)
        elif own[0] is None or not own[0].has_null_count:
            return None
        else:
            number -= int(own[0].null_count)
    return number
