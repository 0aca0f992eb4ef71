"""Steps before writing: add the columns that the user's functions make to finished rows."""

from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from embedder.batch_schema import CARRIED, step_type
from embedder.steps.item_decoder import ItemProblem
from embedder.store.schema import EMBEDDINGS
from embedder.store.tables.arrow_lookup import replace_column
from embedder.user_steps.calls import StepCalls, Values
from embedder.user_steps.declared_steps import ROW_COLUMNS, VECTORS, UserStep


@dataclass(frozen=True)
class WrittenSteps:
    """Steps before writing, in order, as they are sent to write tasks.

    `columns` are names and types of the columns that rows must have, null if no step of the run gives them.
    """

    steps: tuple[UserStep, ...] = ()
    columns: tuple[tuple[str, str], ...] = ()

    def __call__(self, rows: pa.Table) -> pa.Table:
        """Add the steps' columns to finished rows; a row that a step can't take becomes a reject without vectors.

        `rows` follow `embedder.batch_schema`, with both embedding columns. Raises a ServableError if a function can't
        be called any more.
        """
        for step in self.steps:
            rows = _apply(step, _calls_of(step), rows)
        for name, kind in self.columns:
            if CARRIED + name not in rows.schema.names:
                rows = rows.append_column(CARRIED + name, pa.nulls(rows.num_rows, step_type(kind)))
        return rows


NO_STEPS = WrittenSteps()


@cache
def _calls_of(step: UserStep) -> StepCalls:
    """Return a step's process, which consecutive write tasks of this process share."""
    return StepCalls(step)


def forget_calls() -> None:
    """End the processes of steps before writing."""
    _calls_of.cache_clear()


def _apply(step: UserStep, calls: StepCalls, rows: pa.Table) -> pa.Table:
    given = rows.select([_place(name) for name in step.takes]).rename_columns(list(step.takes))
    chosen = pc.is_valid(rows["modality"])
    for name in step.config.inputs:
        chosen = pc.and_(chosen, pc.is_valid(given[name]))
    numbers = [number for number, is_chosen in enumerate(chosen.to_pylist()) if is_chosen]
    results: dict[int, Values | ItemProblem] = {}
    for start in range(0, len(numbers), step.config.batch_size):
        here = numbers[start : start + step.config.batch_size]
        (batch,) = given.take(pa.array(here, pa.int64())).combine_chunks().to_batches()
        results |= zip(here, calls.each(batch), strict=True)
    for name, kind in step.config.outputs.items():
        column = [_value(results.get(number), name) for number in range(rows.num_rows)]
        rows = rows.append_column(CARRIED + name, pa.array(column, step_type(kind)))
    return _reject_rows(rows, {number: found for number, found in results.items() if isinstance(found, ItemProblem)})


def _reject_rows(rows: pa.Table, problems: dict[int, ItemProblem]) -> pa.Table:
    """Remove the vectors of rows that a step couldn't take, and mark their items as rejected."""
    if not problems:
        return rows
    bad = pa.array([number in problems for number in range(rows.num_rows)])
    for name in VECTORS:
        rows = replace_column(rows, name, pc.if_else(bad, pa.scalar(None, EMBEDDINGS.field(name).type), rows[name]))
    ids = rows["item_id"].to_pylist()
    of_items: dict[Any, ItemProblem] = {}
    for number, problem in problems.items():
        of_items.setdefault(ids[number], problem)
    said = [asdict(of_items[item_id]) if item_id in of_items else None for item_id in ids]
    for name in ("step", "error_type", "error", "transient"):
        kind = rows.schema.field(name).type
        new = pa.array([each[name] if each else None for each in said], kind)
        rows = replace_column(rows, name, pc.if_else(pa.array([each is not None for each in said]), new, rows[name]))
    return rows


def _place(name: str) -> str:
    return name if name in ROW_COLUMNS or name in VECTORS else CARRIED + name


def _value(result: Values | ItemProblem | None, name: str) -> Any:
    return None if result is None or isinstance(result, ItemProblem) else result[name]
