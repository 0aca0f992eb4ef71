"""Finished rows -> one part file for each table and one journal entry, which is written last.

A part file that no journal entry names does not exist for anyone; Delta readers see only what is committed.
"""

import json
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from embedder.rows import CARRIED
from embedder.steps.trace import measure
from embedder.store.files import StoreFiles
from embedder.store.journal import JournalEntry, Part, write_entry
from embedder.store.layout import utc_now
from embedder.store.schema import EMBEDDINGS, ITEMS, with_carryover

VECTOR_COLUMNS = ("image_embedding", "text_embedding")


@dataclass(frozen=True)
class Stamp:
    """What every row of a run carries."""

    run_id: str
    session: str
    model_fingerprint: str
    preprocess_fingerprint: str
    carryover: pa.Schema


def write_part(files: StoreFiles, stamp: Stamp, task: int, rows: pa.Table) -> JournalEntry:
    """Write the finished rows as part files and journal them; the same task again replaces the same files.

    Args:
        files: the store.
        stamp: the run's constants.
        task: number of the write task, the same when the same rows are tried again.
        rows: one row a vector row or item record (`embedder.rows`), with both embedding columns.
    """
    name = f"{stamp.session}-{task:06d}"
    with measure("write") as measurement:
        rows = reject_non_finite(rows)
        items = item_records(rows, stamp)
        tables = {"embeddings": vector_rows(rows, stamp), "items": items}
        parts = [
            store_part(files, table, f"part-{stamp.run_id}-{name}.parquet", content, stamp.session)
            for table, content in tables.items()
            if content.num_rows
        ]
        measurement.num_rows = rows.num_rows
        measurement.bytes_out = sum(part.size_bytes for part in parts)
    num_rejects = pc.sum(pc.equal(items["state"], "rejected")).as_py() or 0
    entry = JournalEntry(
        name=name,
        parts=tuple(parts),
        num_items=items.num_rows,
        num_rejects=num_rejects,
        trace=[*(step for steps in rows["trace"].drop_null().to_pylist() for step in steps), vars(measurement)],
    )
    write_entry(files, stamp.run_id, entry)
    return entry


def vector_rows(rows: pa.Table, stamp: Stamp) -> pa.Table:
    """The rows of the embeddings table; rows that only report on an item (no modality) are left out."""
    rows = rows.filter(pc.is_valid(rows["modality"]))
    return _project(rows, EMBEDDINGS, stamp.carryover, _constants(stamp, "embedded_at"))


def item_records(rows: pa.Table, stamp: Stamp) -> pa.Table:
    """One record for each item whose last row is here: the row that knows `num_vectors`."""
    rows = rows.filter(pc.is_valid(rows["num_vectors"]))
    state = pc.if_else(pc.is_valid(rows["error_type"]), "rejected", "embedded")
    rows = rows.append_column("state", state)
    return _project(rows, ITEMS, pa.schema([]), _constants(stamp, "updated_at"))


NON_FINITE = {
    "step": "embed",
    "error_type": "NonFinite",
    "error": "the model gave NaN or infinity; try dtype float32, and check the weights",
    "transient": False,
}


def reject_non_finite(rows: pa.Table) -> pa.Table:
    """Take out vectors with NaN or infinity, and mark their items as rejected in the step `embed`."""
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


def _overwrite(rows: pa.Table, name: str, value: object, mask: pa.Array) -> pa.Table:
    index = rows.schema.get_field_index(name)
    column = rows.schema.field(index)
    return rows.set_column(index, column, pc.if_else(mask, pa.scalar(value, column.type), rows[name]))


def _non_finite_rows(column: pa.Array) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which rows of a list<float> column hold a value that is no finite number; shape (rows,)."""
    bad = np.zeros(len(column), bool)
    values = column.flatten().to_numpy()
    finite = np.isfinite(values)
    if not finite.all():
        bad[pc.list_parent_indices(column).to_numpy()[~finite]] = True
    return bad


def _constants(stamp: Stamp, time_column: str) -> dict[str, object]:
    return {
        "run_id": stamp.run_id,
        "model_fingerprint": stamp.model_fingerprint,
        "preprocess_fingerprint": stamp.preprocess_fingerprint,
        time_column: utc_now(),
    }


def _project(rows: pa.Table, own: pa.Schema, carryover: pa.Schema, constants: dict[str, object]) -> pa.Table:
    """Bring the rows to a table's own columns and the carried ones; constants replace columns of the same name."""
    schema = with_carryover(own, carryover)
    columns = []
    for column in schema:
        if column.name in constants:
            columns.append(pa.repeat(pa.scalar(constants[column.name], column.type), rows.num_rows))
        else:
            name = column.name if column.name in own.names else CARRIED + column.name
            columns.append(rows[name].cast(column.type))
    return pa.Table.from_arrays(columns, schema=schema)


def store_part(files: StoreFiles, table: str, path: str, content: pa.Table, session: str) -> Part:
    """Write one Parquet file into a table's folder; nobody reads it before it is journaled or committed."""
    buffer = BytesIO()
    # Embeddings don't compress and have no repeats: a dictionary of them would only cost time and space.
    plain = [name for name in content.schema.names if name not in VECTOR_COLUMNS]
    pq.write_table(content, buffer, compression="zstd", use_dictionary=plain)
    size_bytes = files.write(f"{table}/{path}", buffer.getvalue())
    return Part(
        table=table,
        path=path,
        num_rows=content.num_rows,
        size_bytes=size_bytes,
        stats=_delta_stats(content),
        session=session,
    )


def _delta_stats(content: pa.Table) -> str:
    """Delta's per-file statistics: row count, and the range of ids, by which readers skip files."""
    ids = pc.min_max(content["item_id"]).as_py()
    return json.dumps(
        {
            "numRecords": content.num_rows,
            "minValues": {"item_id": ids["min"]},
            "maxValues": {"item_id": ids["max"]},
            "nullCount": {"item_id": 0},
        }
    )
