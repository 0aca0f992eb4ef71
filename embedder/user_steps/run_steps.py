"""Steps of a run: those after decoding and those before writing, as the engines take them."""

from collections.abc import Iterable, Mapping

import pyarrow as pa

from embedder.config_toml.sections import StepConfig, StepPlace
from embedder.user_steps.calls import check_steps_load
from embedder.user_steps.declared import check_columns, new_columns, open_step
from embedder.user_steps.decoded_rows import DecodedSteps
from embedder.user_steps.written_rows import WrittenSteps


def decoded_steps(steps: Iterable[StepConfig]) -> DecodedSteps | None:
    """Return the steps after decoding; none where there is none.

    Raises:
        StepError: one names no function that can be found here.
        ServableError: a file is missing.
    """
    chosen = _at(steps, "after_decode")
    if not chosen:
        return None
    return DecodedSteps(tuple(map(open_step, chosen)), tuple(new_columns(chosen).items()))


def written_steps(steps: Iterable[StepConfig], columns: Mapping[str, str]) -> WrittenSteps:
    """Return the steps before writing.

    Raises:
        StepError, ServableError: as `decoded_steps`.
    """
    return WrittenSteps(tuple(map(open_step, _at(steps, "before_write"))), tuple(columns.items()))


def check_run_steps(steps: Iterable[StepConfig], carried: pa.Schema, *, may_load: bool) -> None:
    """Refuse, before anything is done, steps that can't be run as they are declared.

    Args:
        steps: of the configuration.
        carried: columns carried into the embeddings table.
        may_load: whether each function is imported, in a process of its own.

    Raises:
        StepError: a column is unknown, or a name is taken.
        ServableError: a function can't be imported.
    """
    steps = tuple(steps)
    check_columns(steps, carried.names)
    if may_load:
        check_steps_load(map(open_step, steps))


def _at(steps: Iterable[StepConfig], place: StepPlace) -> list[StepConfig]:
    return [step for step in steps if step.where == place]
