"""Writer of finished rows: a part file for each table, then one journal entry.

A part file that no journal entry names is ignored; Delta readers see only what is committed.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from obstore.exceptions import BaseError

from embedder.batch_schema import CARRIED, medium_schema
from embedder.errors import StoreError
from embedder.medium_columns import BY_NAME
from embedder.storage.vector_pages import layout_options
from embedder.store.files import StoreFiles, parquet_bytes
from embedder.store.journal.journal import TASK_DIGITS, JournalEntry, entry_name, entry_path
from embedder.store.journal.journal_segments import find_entry
from embedder.store.journal.metadata_updates import MOVED, moves_file
from embedder.store.journal.step_metrics import measure
from embedder.store.layout import record_bytes, utc_now
from embedder.store.part_file import PartFile
from embedder.store.schema import EMBEDDINGS, ITEMS, VECTOR_COLUMNS, to_stored, with_carryover
from embedder.store.store_errors import StoreUnavailableError
from embedder.store.tables.arrow_lookup import replace_column, without_items
from embedder.store.tables.arrow_tensors import is_half, round_vectors
from embedder.store.tables.item_states import split_records

LAST_TASK = 10**TASK_DIGITS - 1  # of the rows left over by a stopped run; write tasks have lower numbers
NO_COLUMNS = pa.schema([])
BOUNDED = ("item_id", "state")
"""Columns without nulls, of which a log records the minimum and maximum of each file."""
NUM_REWRITERS = 4
"""Part files rewritten in parallel; each has at most 64 MiB and needs about four times its size in memory."""
MIN_STREAM_VALUES = 1 << 14
"""Values of a column from which those of half precision are worth their own encoding."""
PART_FILES = (("embeddings", ".parquet"), ("items", ".parquet"), ("items", "-kept.parquet"))
"""Files of a write task: vectors, records of items with new rows, and records of items whose published rows stay."""

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True)
class RunMetadata:
    """Values that all rows of a run share."""

    run_id: str
    session: str
    model_fingerprint: str
    preprocess_fingerprint: str
    carryover: pa.Schema
    outputs: pa.Schema = NO_COLUMNS
    """Outputs of a model besides vectors: like the carried columns, but as old as the vectors."""
    is_half: bool = False
    """Whether vectors are rounded to half precision (`vectors = "float16"`)."""

    @property
    def columns(self) -> pa.Schema:
        """Return the columns of the embeddings table besides its own."""
        return pa.schema([*self.carryover, *self.outputs])


def write_part(
    files: StoreFiles, metadata: RunMetadata, task: int, rows: pa.Table, *, attempt: int = 0
) -> JournalEntry:
    """Write the finished rows as part files and journal them.

    Each attempt of a task writes its own files and replaces the task's one journal entry last: an earlier attempt on an
    unreachable node may still be alive and writing. `task` stays the same when the same rows are retried; `attempt`
    counts earlier starts. `rows` has one row per vector or item record (`embedder.batch_schema`), with both embedding
    columns.
    """
    name = entry_name(metadata.session, task)
    path = f"part-{metadata.run_id}-{name}" + (f"-r{attempt}" if attempt else "")
    with _undone_on_failure(files, metadata, name, path):
        with measure("write") as measurement:
            rows = reject_non_finite(rows)
            rows = round_rows(rows) if metadata.is_half else rows
            rows = with_medium(rows, metadata.outputs)
            own_rows, kept_rows = split_records(rows)
            own, kept = (_item_records(each, metadata) for each in (own_rows, kept_rows))
            own_vectors = _vector_rows(without_items(rows, kept["item_id"]), metadata)
            parts = [
                store_part(files, table, path + suffix, content, metadata.session, kept=content is kept)
                for (table, suffix), content in zip(PART_FILES, (own_vectors, own, kept), strict=True)
                if content.num_rows
            ]
            if kept.num_rows:
                moves = _project(kept_rows, MOVED, metadata.carryover, {})
                files.write_table(moves_file(metadata.run_id, name), moves)
            measurement.num_rows = rows.num_rows
            measurement.bytes_out = sum(part.size_bytes for part in parts)
        entry = JournalEntry(
            name=name,
            parts=tuple(parts),
            num_items=own.num_rows + kept.num_rows,
            num_rejects=sum(_num_rejected(records) for records in (own, kept)),
            num_moves=kept.num_rows,
            trace=[*(step for steps in rows["trace"].drop_null().to_pylist() for step in steps), vars(measurement)],
        )
        files.write(entry_path(metadata.run_id, name), record_bytes(entry))
    return entry


def write_copies(
    files: StoreFiles, metadata: RunMetadata, task: int, copies: Mapping[str, pa.Table], taken_from: str
) -> JournalEntry:
    """Write rows and records of another publication unchanged, and journal them."""
    name = entry_name(metadata.session, task)
    items = copies.get("items", ITEMS.empty_table())
    path = f"part-{metadata.run_id}-{name}"
    with _undone_on_failure(files, metadata, name, path):
        parts = [
            store_part(files, table, f"{path}.parquet", content, metadata.session) for table, content in copies.items()
        ]
        entry = JournalEntry(
            name=name,
            parts=tuple(parts),
            num_items=items.num_rows,
            num_rejects=_num_rejected(items),
            trace=[],
            taken_from=taken_from,
        )
        files.write(entry_path(metadata.run_id, name), record_bytes(entry))
    return entry


def gather_rows(tables: Iterable[pa.Table], num_rows: int) -> Iterator[pa.Table]:
    """Join small tables, whose columns may be in different orders, into tables of at least `num_rows` rows."""
    waiting: list[pa.Table] = []
    for table in tables:
        if table.num_rows:  # some of the others lack columns
            waiting.append(table.select(waiting[0].schema.names) if waiting else table)
        if sum(each.num_rows for each in waiting) >= num_rows:
            yield pa.concat_tables(waiting)
            waiting = []
    if waiting:
        yield pa.concat_tables(waiting)


@contextmanager
def _undone_on_failure(files: StoreFiles, metadata: RunMetadata, name: str, path: str) -> Iterator[None]:
    """Delete a write task's part files if the block fails; otherwise a full disk would stay full of unused files.

    They stay if an earlier attempt has left its journal entry, or if a request had no answer: the entry that names them
    may still reach the server.
    """
    try:
        yield
    except StoreUnavailableError:
        raise
    except Exception:
        with suppress(OSError, BaseError, StoreError):
            if find_entry(files, metadata.run_id, name) is None:
                for table, suffix in PART_FILES:
                    files.delete(f"{table}/{path}{suffix}")
                files.delete(moves_file(metadata.run_id, name))
        raise


def _vector_rows(rows: pa.Table, metadata: RunMetadata) -> pa.Table:
    """Return the rows of the embeddings table, without rows that only report on an item (no modality)."""
    rows = rows.filter(pc.is_valid(rows["modality"]))
    return _project(rows, EMBEDDINGS, metadata.columns, _constants(metadata, "embedded_at"))


def _item_records(rows: pa.Table, metadata: RunMetadata) -> pa.Table:
    return _project(rows, ITEMS, NO_COLUMNS, _constants(metadata, "updated_at"))


def _num_rejected(items: pa.Table) -> int:
    return pc.sum(pc.equal(items["state"], "rejected")).as_py() or 0


NON_FINITE = {
    "step": "embed",
    "error_type": "NonFinite",
    "error": "the model gave NaN or infinity; try dtype float32, and check the weights",
    "transient": False,
}


def with_medium(rows: pa.Table, outputs: pa.Schema) -> pa.Table:
    """Add the columns of the medium among `outputs` to finished rows, from the JSON of each row."""
    names = [name for name in outputs.names if name in BY_NAME and CARRIED + name not in rows.schema.names]
    said = rows["medium"].to_pylist() if names and "medium" in rows.schema.names else [None] * rows.num_rows
    values = [json.loads(each) if each else {} for each in said]
    for column in medium_schema(names):
        rows = rows.append_column(
            CARRIED + column.name, medium_array([each.get(column.name) for each in values], column)
        )
    return rows


def medium_array(values: Sequence[Any], column: pa.Field) -> pa.Array:
    """Return values of a column of the medium, as JSON has them, as Arrow; what is not of its type is null."""
    try:
        if pa.types.is_timestamp(column.type):
            times = [None if each is None else datetime.fromisoformat(each) for each in values]
            return pa.array(times, pa.timestamp("us")).cast(column.type)
        if pa.types.is_integer(column.type):  # Arrow would cut fractions
            values = [None if isinstance(each, float) and each % 1 else each for each in values]
        return pa.array(values, column.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, TypeError, ValueError):  # a file may claim anything
        if len(values) == 1:
            return pa.nulls(1, column.type)
        return pa.concat_arrays([medium_array([each], column) for each in values])


def reject_non_finite(rows: pa.Table) -> pa.Table:
    """Remove vectors with NaN or infinity, and mark their items as rejected in the step `embed`."""
    bad = np.zeros(rows.num_rows, bool)
    for name in VECTOR_COLUMNS:
        bad |= _non_finite_rows(rows[name].combine_chunks())
    if not bad.any():
        return rows
    bad_items = pc.is_in(rows["item_id"], value_set=rows["item_id"].filter(pa.array(bad)).combine_chunks())
    for name in VECTOR_COLUMNS:
        rows = _overwrite(rows, name, None, pa.array(bad))
    for name, value in NON_FINITE.items():
        rows = _overwrite(rows, name, value, bad_items)
    return rows


def round_rows(rows: pa.Table) -> pa.Table:
    """Round the vectors of rows of the embeddings table, or of finished ones, to half precision."""
    for name in VECTOR_COLUMNS:
        rows = replace_column(rows, name, round_vectors(rows[name]))
    return rows


def _overwrite(rows: pa.Table, name: str, value: object, mask: pa.Array) -> pa.Table:
    return replace_column(rows, name, pc.if_else(mask, pa.scalar(value, rows[name].type), rows[name]))


def _non_finite_rows(column: pa.Array) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return a mask (rows,) of the rows of a list<float> column with a non-finite value."""
    bad = np.zeros(len(column), bool)
    values = column.flatten().to_numpy()
    finite = np.isfinite(values)
    if not finite.all():
        bad[pc.list_parent_indices(column).to_numpy()[~finite]] = True
    return bad


def _constants(metadata: RunMetadata, time_column: str) -> dict[str, object]:
    return {
        "run_id": metadata.run_id,
        "model_fingerprint": metadata.model_fingerprint,
        "preprocess_fingerprint": metadata.preprocess_fingerprint,
        time_column: utc_now(),
    }


def _project(rows: pa.Table, own: pa.Schema, carryover: pa.Schema, constants: dict[str, object]) -> pa.Table:
    schema = with_carryover(own, carryover)
    columns = []
    for column in schema:
        if column.name in constants:
            columns.append(pa.repeat(pa.scalar(constants[column.name], column.type), rows.num_rows))
        else:
            name = column.name if column.name in own.names else CARRIED + column.name
            columns.append(to_stored(rows[name], column))
    return pa.Table.from_arrays(columns, schema=schema)


def rewrite_each(rewrite: Callable[[T], S], of: Sequence[T]) -> list[S]:
    """Rewrite part files, a few in parallel: Arrow encodes on other cores, and a bucket answers meanwhile.

    `rewrite` reads and writes one part file, which is in memory meanwhile. Results are in the order of `of`.
    """
    with ThreadPoolExecutor(NUM_REWRITERS, "rewrite") as pool:
        return list(pool.map(rewrite, of))


def rewritten_name(run_id: str, session: str, reason: str, paths: Iterable[str]) -> str:
    """Return the deterministic name of the part file that replaces others; its length stays constant.

    The session is part of the name, as another one may decide that other rows stay. `reason` is compact, purge or
    rewrite.
    """
    digest = hashlib.blake2b("\n".join([session, *paths]).encode(), digest_size=8).hexdigest()
    return f"part-{run_id}-{reason}-{digest}.parquet"


def store_part(
    files: StoreFiles, table: str, path: str, content: pa.Table, session: str, *, kept: bool = False
) -> PartFile:
    """Write one Parquet file to a table's folder; it is not read until it is journaled or committed.

    `path` is relative to that folder; `kept` marks records of items whose published embeddings stay.
    """
    part, data = encode_part(table, path, content, session, kept=kept)
    files.write(f"{table}/{path}", data)
    return part


def encode_part(
    table: str, path: str, content: pa.Table, session: str, *, kept: bool = False
) -> tuple[PartFile, bytes]:
    """Encode a Parquet file as `store_part` does, with its entry for a log or journal; nothing is written."""
    # A column's own values say how it is written, so that no rewriting changes it.
    sizes = {name: pc.sum(pc.list_value_length(content[name])).as_py() or 0 for name in _vector_columns(content)}
    streams = [name for name, size in sizes.items() if size >= MIN_STREAM_VALUES and is_half(content[name])]
    data = parquet_bytes(content, **layout_options(content.schema, VECTOR_COLUMNS, streams))
    part = PartFile(
        table=table,
        path=path,
        num_rows=content.num_rows,
        size_bytes=len(data),
        stats=_delta_stats(content),
        session=session,
        kept=kept,
    )
    return part, data


def _vector_columns(content: pa.Table) -> list[str]:
    return [name for name in VECTOR_COLUMNS if name in content.schema.names]


def _delta_stats(content: pa.Table) -> str:
    """Return a file's statistics for Delta: rows, rows without a vector, ranges of ids and states, to skip files."""
    names = [name for name in BOUNDED if name in content.schema.names]
    bounds = {name: pc.min_max(content[name]).as_py() for name in names if content.num_rows}
    return json.dumps(
        {
            "numRecords": content.num_rows,
            "minValues": {name: own["min"] for name, own in bounds.items()},
            "maxValues": {name: own["max"] for name, own in bounds.items()},
            "nullCount": dict.fromkeys(names, 0)
            | {name: content[name].null_count for name in _vector_columns(content)},
        }
    )
