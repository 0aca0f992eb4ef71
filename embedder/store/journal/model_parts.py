"""Write tasks of a run of several models: what of each row is for each of them, written into its own part files.

A model's rows are those of items that it needs. One whose content is as that model's published rows have it only
reports on itself, and a row that the model could not compute makes its item a reject of that model alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from embedder.batch_schema import CARRIED, HUNG, TRACE, VECTOR
from embedder.store.files import StoreFiles
from embedder.store.journal.journal import JournalEntry
from embedder.store.journal.part_writer import VECTOR_COLUMNS, RunMetadata, write_part
from embedder.store.tables.item_states import HELD_COLUMNS, KNOWN_COLUMNS

ERROR_TYPE, TIMEOUT_TYPE = "ModelFailed", "ModelTimeout"
PER_MODEL = ("reason", "attempts", *KNOWN_COLUMNS)
"""Columns of a listing that each model has of its own; the main model's are without its name."""


@dataclass(frozen=True)
class ModelPart:
    """Further model as write tasks know it.

    Attributes:
        files: view of its folder.
        metadata: constants of its rows.
        columns: columns of its table by the outputs of its servable.
    """

    files: StoreFiles
    metadata: RunMetadata
    columns: tuple[tuple[str, str], ...]


def write_parts(
    files: StoreFiles,
    metadata: RunMetadata,
    models: Sequence[ModelPart],
    task: int,
    rows: pa.Table,
    *,
    attempt: int = 0,
) -> JournalEntry:
    """Write the finished rows of all models, the main one's last: its journal entry says that all are written.

    Args:
        files: the store.
        metadata: constants of the main model's rows.
        models: the further ones.
        task: number of the write task.
        rows: as `part_writer.write_part` takes them, with `NAME.OUTPUT` and `NAME.error` of each model.
        attempt: number of times that the task was begun before.
    """
    for model in models:
        write_part(model.files, model.metadata, task, rows_of_model(rows, model), attempt=attempt)
    return write_part(files, metadata, task, rows_of_main(rows) if models else rows, attempt=attempt)


def rows_of_main(rows: pa.Table) -> pa.Table:
    """Rows of items that the main model needs."""
    return _as_needed(rows.filter(pc.is_valid(rows["reason"])), "")


def rows_of_model(rows: pa.Table, model: ModelPart) -> pa.Table:
    """Rows of items that a further model needs, with its outputs in the place of the main model's."""
    name = model.files.model
    rows = rows.filter(pc.is_valid(rows[f"reason@{name}"]))
    own = {column: rows[f"{column}@{name}"] for column in PER_MODEL}
    own["trace"] = pa.nulls(rows.num_rows, TRACE)
    own |= {column: pa.nulls(rows.num_rows, VECTOR) for column in VECTOR_COLUMNS}
    for output, column in model.columns:
        key = column if column in VECTOR_COLUMNS else CARRIED + column
        own[key] = rows[f"{name}.{output}"]
    rows = _with_columns(rows.drop_columns([each for each in HELD_COLUMNS if each in rows.column_names]), own)
    return _with_rejects(_as_needed(rows, name), name)


def _as_needed(rows: pa.Table, name: str) -> pa.Table:
    """Let rows only report on their items where the model has that content already."""
    needed = pc.fill_null(rows[f"needed@{name}"], False)
    counts = pc.if_else(needed, rows["num_vectors"], pc.min_element_wise(rows["num_vectors"], 0, skip_nulls=False))
    values = {
        "modality": pc.if_else(needed, rows["modality"], pa.scalar(None, pa.string())),
        "num_vectors": counts.cast(pa.int32()),
        "unchanged": pc.invert(needed),
    }
    return _with_columns(rows, values)


def _with_rejects(rows: pa.Table, name: str) -> pa.Table:
    """Mark the items of rows that the model could not compute; what failed before that stays as it is told."""
    failed = pc.and_(pc.is_valid(rows[f"{name}.error"]), pc.is_valid(rows["modality"]))
    if not pc.any(failed).as_py():
        return rows
    bad = rows.filter(failed)
    reasons = dict(zip(reversed(bad["item_id"].to_pylist()), reversed(bad[f"{name}.error"].to_pylist()), strict=True))
    errors = pa.array([reasons.get(item) for item in rows["item_id"].to_pylist()], pa.string())
    is_new = pc.and_(pc.is_valid(errors), pc.is_null(rows["error_type"]))
    hung = pc.fill_null(pc.match_substring(errors, HUNG), False)
    return _with_columns(
        rows,
        {
            "step": pc.if_else(is_new, f"model {name}", rows["step"]),
            "error_type": pc.if_else(is_new, pc.if_else(hung, TIMEOUT_TYPE, ERROR_TYPE), rows["error_type"]),
            "error": pc.if_else(is_new, errors, rows["error"]),
            "transient": pc.if_else(is_new, hung, rows["transient"]),
        },
    )


def _with_columns(rows: pa.Table, values: Mapping[str, pa.ChunkedArray | pa.Array]) -> pa.Table:
    for name, column in values.items():
        if name in rows.column_names:
            rows = rows.set_column(rows.schema.get_field_index(name), name, column)
        else:
            rows = rows.append_column(name, column)
    return rows
