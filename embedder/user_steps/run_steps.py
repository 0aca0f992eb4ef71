"""Steps of a run, after decoding and before writing, in the form that the engines take."""

from collections.abc import Iterable, Mapping

import pyarrow as pa

from embedder.config_toml.own_code_sections import StepConfig, StepPlace
from embedder.user_steps.calls import check_steps_load
from embedder.user_steps.declared_steps import ROW_COLUMNS, VECTORS, check_columns, new_columns, open_step
from embedder.user_steps.decoded_rows import DecodedSteps
from embedder.user_steps.written_rows import WrittenSteps

OF_THE_NAME = {"item_id", "uri"}
"""Columns of rows that differ between items of one content."""


def decoded_steps(steps: Iterable[StepConfig]) -> DecodedSteps | None:
    """Return the steps after decoding; None if there are none.

    Raises:
        StepError: one names no function that can be found here.
        ServableError: a file is missing.
    """
    chosen = _at(steps, "after_decode")
    if not chosen:
        return None
    return DecodedSteps(tuple(map(open_step, chosen)), tuple(new_columns(chosen).items()))


def written_steps(steps: Iterable[StepConfig], columns: Mapping[str, str]) -> WrittenSteps:
    """Return the steps before writing; raises like `decoded_steps`."""
    return WrittenSteps(tuple(map(open_step, _at(steps, "before_write"))), tuple(columns.items()))


def check_run_steps(steps: Iterable[StepConfig], carried: pa.Schema, *, may_load: bool) -> None:
    """Check, before any work, that the steps can be run as declared.

    `carried` are the columns carried into the embeddings table. With `may_load`, each function is imported in its own
    process.

    Raises:
        StepError: a column is unknown, or a name is taken.
        ServableError: a function can't be imported.
    """
    steps = tuple(steps)
    check_columns(steps, carried.names)
    if may_load:
        check_steps_load(map(open_step, steps))


def depend_on_content(steps: Iterable[StepConfig]) -> bool:
    """Return whether the steps give the same for all items of one content, whatever their names.

    What the sources say of an item is part of its content only for steps after decoding.
    """
    made = set(ROW_COLUMNS) - OF_THE_NAME | VECTORS.keys() | {"image"}
    for step in steps:
        taken = {*step.inputs, *step.optional}
        if taken & OF_THE_NAME or (step.where == "before_write" and not taken <= made):
            return False
        made |= step.outputs.keys()
    return True


def _at(steps: Iterable[StepConfig], place: StepPlace) -> list[StepConfig]:
    return [step for step in steps if step.where == place]
