"""Further models that process decoded rows, in actors of a run on Ray or in the process of the local engine.

They precede the main model's stages, while its inputs, which they may share, still exist. Each computes the rows that
it or a model depending on it needs. Its outputs are in NAME.OUTPUT, and NAME.error says why a row has none.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.media.limits import DecodeLimits
from embedder.models.further_models import FurtherModel
from embedder.servables.order import ERROR
from embedder.servables.packing import ActorGroup, pack_servables
from embedder.servables.predict import ACTOR_BYTES, ServableActor, ServableStage, item_inputs
from embedder.servables.running_servable import RunningServable
from embedder.steps.further_inputs import for_main, is_needed
from embedder.store.journal.runs import Run
from embedder.store.journal.step_metrics import measure, trace_column


@dataclass(frozen=True)
class ModelGroup:
    """Further models that share an actor, one for each of its servables.

    `actor` says what it holds and reserves; `shared` has the main model's input columns by the names that servables
    use; `needed_later` are decoded columns that later groups need (others are dropped here); `is_last` says whether the
    main model's stages follow.
    """

    models: tuple[FurtherModel, ...]
    actor: ActorGroup
    shared: tuple[tuple[str, str], ...]
    needed_later: frozenset[str]
    is_last: bool


def group_models(models: Sequence[FurtherModel], shared: dict[str, str]) -> tuple[ModelGroup, ...]:
    """Group models into actors by memory, keeping their order.

    `shared` comes from `embedder.models.further_models.shared_columns`. Raises `ServableError` if a file is missing.
    """
    by_name = {part.name: model for model in models for part in model.servable.parts()}
    actors = pack_servables([model.servable for model in models], ACTOR_BYTES)
    found = []
    for number, actor in enumerate(actors):
        later = [servable for each in actors[number + 1 :] for servable in each.servables]
        found.append(
            ModelGroup(
                models=tuple(by_name[each.name] for each in actor.servables),
                actor=actor,
                shared=tuple(shared.items()),
                needed_later=frozenset(item_inputs(later)),
                is_last=number == len(actors) - 1,
            )
        )
    return tuple(found)


class ModelStage(ServableStage):
    """Further models of a group: each computes the rows that need it."""

    def __init__(self, group: ModelGroup, limits: DecodeLimits) -> None:
        super().__init__(group.actor, limits, group.needed_later)
        self._models = group

    def process(self, table: pa.Table) -> pa.Table:
        """Append the columns of the models; decoded inputs that nothing needs any more are dropped."""
        group = self._models
        lent = {name: own for name, own in group.shared if own in table.column_names}
        for name, own in lent.items():
            table = table.append_column(name, table[own])
        for model, servable in zip(group.models, self.running, strict=True):
            with measure(f"model {servable.servable.name}") as measurement:
                table, measurement.num_rows = _run_where_needed(table, model, servable)
            if measurement.num_rows:
                trace = trace_column(table.num_rows, measurement, table["trace"])
                table = table.drop_columns(["trace"]).append_column("trace", trace)
        table = self.without_ended(table, lent)
        return for_main(table) if group.is_last else table


class ModelActor(ServableActor):
    """Ray actor of a group of models."""

    def __init__(self, group: ModelGroup, limits: DecodeLimits, run: Run | None = None) -> None:
        """Load the servables; `limits` are for decoding images that servables return, `run` is as in `RowActor`."""
        super().__init__(ModelStage(group, limits), group.actor, run)


def _run_where_needed(table: pa.Table, model: FurtherModel, running: RunningServable) -> tuple[pa.Table, int]:
    """Append a model's columns, null in rows that neither it nor a model depending on it needs; count the others."""
    masks = [is_needed(table, name) for name in model.computed_for]
    if any(mask is None for mask in masks):
        return running(table), table.num_rows
    needed = np.logical_or.reduce([mask.to_numpy() for mask in masks if mask is not None])
    num_rows = int(needed.sum())
    if not num_rows:
        servable = running.servable
        for name, output in servable.output_columns().items():
            table = table.append_column(f"{servable.name}.{name}", pa.nulls(table.num_rows, output.arrow_type()))
        table = table.append_column(f"{servable.name}.{ERROR}", pa.nulls(table.num_rows, pa.string()))
        return table.drop_columns(list(servable.ended_columns())), 0
    found = running(table.filter(pa.array(needed)))
    place = pa.array(np.cumsum(needed) - 1, mask=~needed)
    for name in found.column_names:
        if name not in table.column_names:
            table = table.append_column(name, pc.take(found[name], place))
    return table.drop_columns(list(running.servable.ended_columns())), num_rows
