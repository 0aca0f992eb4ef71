"""Write tasks of a run of several models: each row's values for each model go into that model's own part files.

A model's rows are those of items that it needs. If the model's published rows already have a row's content, the row
only reports on its item. A row that the model could not compute makes its item a reject of only that model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from embedder.batch_schema import CARRIED, HUNG, NEEDED, REASON, TRACE, VECTOR, model_column
from embedder.store.files import StoreFiles
from embedder.store.journal.journal import JournalEntry
from embedder.store.journal.part_writer import RunMetadata, write_part
from embedder.store.schema import VECTOR_COLUMNS
from embedder.store.tables.item_states import HELD_VERSIONS, KNOWN_COLUMNS

ERROR_TYPE, TIMEOUT_TYPE = "ModelFailed", "ModelTimeout"
PER_MODEL = (REASON, "attempts", *KNOWN_COLUMNS)
"""Columns of a listing that each model has (`model_column`)."""


@dataclass(frozen=True)
class ModelPart:
    """Model of a run, as write tasks know it.

    `files` is the view of its folder; `columns` maps outputs of a further model's servable to columns of its table.
    """

    files: StoreFiles
    metadata: RunMetadata
    columns: tuple[tuple[str, str], ...] = ()


def write_parts(models: Sequence[ModelPart], task: int, rows: pa.Table, *, attempt: int = 0) -> JournalEntry:
    """Write the finished rows of all models, and return the journal entry of the main one, the first of `models`.

    Its part is written last: its entry says that all are written. `rows` are as in `part_writer.write_part`, with
    `NAME.OUTPUT` and `NAME.error` for each further model. `attempt` counts earlier starts of the task.
    """
    main, *further = models
    for model in further:
        write_part(model.files, model.metadata, task, rows_of_model(rows, model), attempt=attempt)
    return write_part(main.files, main.metadata, task, rows_of_model(rows, main) if further else rows, attempt=attempt)


def rows_of_model(rows: pa.Table, model: ModelPart) -> pa.Table:
    """Return the rows of items that one of several models needs, with its outputs."""
    name = model.files.model
    rows = rows.filter(pc.is_valid(rows[model_column(REASON, name)]))
    return _with_rejects(_as_needed(_with_outputs(rows, model), name), name) if name else _as_needed(rows, name)


def _with_outputs(rows: pa.Table, model: ModelPart) -> pa.Table:
    """Put a further model's outputs, and what is known of its items, in place of the main model's."""
    name = model.files.model
    own = {column: rows[model_column(column, name)] for column in PER_MODEL}
    own["trace"] = pa.nulls(rows.num_rows, TRACE)
    own |= {column: pa.nulls(rows.num_rows, VECTOR) for column in VECTOR_COLUMNS}
    for output, column in model.columns:
        key = column if column in VECTOR_COLUMNS else CARRIED + column
        own[key] = rows[f"{name}.{output}"]
    has_held = HELD_VERSIONS.name in rows.column_names
    return _with_columns(rows.drop_columns([HELD_VERSIONS.name]) if has_held else rows, own)


def _as_needed(rows: pa.Table, name: str) -> pa.Table:
    """Make rows only report on their items if the model already has that content."""
    needed = pc.fill_null(rows[model_column(NEEDED, name)], False)
    counts = pc.if_else(needed, rows["num_vectors"], pc.min_element_wise(rows["num_vectors"], 0, skip_nulls=False))
    values = {
        "modality": pc.if_else(needed, rows["modality"], pa.scalar(None, pa.string())),
        "num_vectors": counts.cast(pa.int32()),
        "unchanged": pc.invert(needed),
    }
    return _with_columns(rows, values)


def _with_rejects(rows: pa.Table, name: str) -> pa.Table:
    """Mark the items of rows that the model could not compute; earlier failures keep their report."""
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
    return pa.table(dict(zip(rows.column_names, rows.columns, strict=True)) | dict(values))
