"""Parts of towers that are cut: a servable for each shard, which hands its activations to the next one."""

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from embedder.batch_schema import IMAGE_GRID
from embedder.errors import ConfigError
from embedder.servables.base import Servable
from embedder.servables.columns import ColumnInput, InputColumn, OutputColumn, TowerPixelsInput
from embedder.servables.errors import ServableError
from embedder.servables.order import ERROR
from embedder.servables.program import ServableProgram
from embedder.servables.towers import INPUTS, TOWERS, Side, TowersServable, local_folder
from shards.config import ModelConfig
from shards.errors import ModelError
from shards.fingerprint import model_fingerprint
from shards.plan import PlannedStage, ShardPlan, check_plan, plan_shards
from shards.ranges import ShardSpec


def cut_towers(whole: TowersServable, config: ModelConfig, sides: list[Side]) -> tuple[Servable, ...]:
    """Cut towers as their plan says, or into as many shards of equal work as they ask for.

    Args:
        whole: the towers.
        config: of their model.
        sides: that are embedded.

    Raises:
        ConfigError: the plan file is missing, or made for other weights.
        ServableError: there are fewer layers than stages, or the plan doesn't fit.
    """
    left_out = {tower: None for side, tower in TOWERS.items() if side not in sides}
    try:
        if whole.plan is None:
            plan = plan_shards(config.model_copy(update=left_out), whole.stages, dtype=whole.dtype)
        else:
            folder = local_folder(whole.uri)
            plan = read_plan(whole.plan, folder, model_fingerprint(folder), whole.dtype)
            check_plan(plan, config)
            if len(sides) < len(config.towers):
                raise ServableError(f"{whole.where()}: plan {whole.plan} is for both towers; leave out sides, or plan")
    except ModelError as error:
        asked = f"stages = {whole.stages}" if whole.plan is None else f"plan {whole.plan}"
        raise ServableError(f"{whole.where()}: {asked}: {error}") from None
    shards = tuple(stage.spec for stage in plan.stages)
    settings = {key: getattr(whole, key) for key in whole.model_fields_set} | {"stages": 1, "plan": None}
    names = [*(f"{whole.name}-{number}" for number in range(len(shards) - 1)), whole.name]
    settings |= {"memory_bytes": whole.size_bytes() // len(shards), "shards": shards, "of_model": whole.name}
    return tuple(
        TowersPart(**settings | _resources(stage) | {"name": name, "number": number})
        for number, (name, stage) in enumerate(zip(names, plan.stages, strict=True))
    )


def _resources(stage: PlannedStage) -> dict[str, float]:
    """What a stage of a plan for a fleet is given, in the keys of a servable; nothing where the plan says nothing."""
    if stage.num_gpus is None:
        return {}
    found = {"replicas": stage.num_replicas, "num_gpus": stage.num_gpus, "memory_bytes": stage.memory_bytes}
    if not stage.num_gpus:
        found["num_cpus"] = stage.num_threads
    return {key: value for key, value in found.items() if value is not None}


def read_plan(path: str, folder: Path, fingerprint: str, dtype: str | None) -> ShardPlan:
    """Read the plan of a model.

    Args:
        path: of the file.
        folder: of the model, for messages.
        fingerprint: of its weights.
        dtype: that it is computed in; None takes the plan's.

    Raises:
        ConfigError: the file is missing, or made for other weights or another dtype.
        shards.ModelError: it is no plan.
    """
    try:
        plan = ShardPlan.from_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"plan {path}: {error.strerror}; make one with `embedder plan --out`") from None
    if plan.model_fingerprint not in (None, fingerprint):
        raise ConfigError(
            f"plan {path}: made for model {plan.model_fingerprint}, and {folder} is {fingerprint}; "
            "make a new one with `embedder plan --out`"
        )
    if dtype is not None and plan.dtype not in (None, dtype):
        raise ConfigError(
            f"plan {path}: made for {plan.dtype}, and the run computes in {dtype}; "
            f"run with --dtype {plan.dtype}, or make a new one with `embedder plan --dtype {dtype} --out`"
        )
    return plan


class TowersPart(TowersServable):
    """Shard of cut towers: takes what decode makes or the shards before it return; the last one has all embeddings."""

    is_part: ClassVar[bool] = True

    of_model: str
    number: int
    shards: tuple[ShardSpec, ...]

    @property
    def _shard(self) -> ShardSpec:
        return self.shards[self.number]

    @property
    def _is_last(self) -> bool:
        return self.number == len(self.shards) - 1

    def _handles(self, side: Side, number: int) -> bool:
        return len(self.shards[number].layers_of(TOWERS[side])) > 0

    def _giver(self, side: Side) -> int | None:
        """Number of the shard before this one that computes the side; None where the side begins here."""
        return max((number for number in range(self.number) if self._handles(side, number)), default=None)

    def _state(self, side: Side, number: int) -> str:
        """Name of what a shard makes of a side: activations, or the embedding at the end of its tower."""
        depth = self._config.num_layers[TOWERS[side]]
        is_whole = self.shards[number].layers_of(TOWERS[side]).stop == depth
        return f"{side}_embedding" if is_whole else f"{side}_activation"

    def _part(self, number: int) -> str:
        return self.of_model if number == len(self.shards) - 1 else f"{self.of_model}-{number}"

    def _has_grid(self) -> bool:
        declared = super().input_columns().get(INPUTS["image"])
        return isinstance(declared, TowerPixelsInput) and declared.rule.mode == "patches"

    def input_columns(self) -> Mapping[str, InputColumn]:
        """Return what decode makes for the sides that begin here, and what earlier shards made of the others."""
        whole, found = super().input_columns(), dict[str, InputColumn]()
        for side in self._sides():
            giver = self._giver(side)
            if giver is None:
                if self._handles(side, self.number):
                    found[INPUTS[side]] = whole[INPUTS[side]]
                continue
            state = self._state(side, giver)
            if state.endswith("_embedding"):
                if self._is_last:
                    found[state] = self._column(giver, state, super().output_columns()[state])
            elif self._handles(side, self.number):
                found[state] = self._column(giver, state, OutputColumn(type="binary"))
                if side == "image" and self._has_grid():
                    found[IMAGE_GRID.name] = self._column(giver, IMAGE_GRID.name, OutputColumn(type="binary"))
        return found

    def _column(self, giver: int, name: str, output: OutputColumn) -> ColumnInput:
        of = f"{self._part(giver)}.{name}"
        return ColumnInput(of=of, type=output.type, shape=output.shape, optional=True)

    def output_columns(self) -> Mapping[str, OutputColumn]:
        """Return the state of each side that is computed here; of the last shard, the embeddings of all."""
        if self._is_last:
            inputs = self.input_columns()
            return {
                name: output.model_copy(update={"of": (self._source(name, inputs),)})
                for name, output in super().output_columns().items()
            }
        found, inputs = dict[str, OutputColumn](), self.input_columns()
        for side in self._sides():
            if not self._handles(side, self.number):
                continue
            state = self._state(side, self.number)
            of = (self._source(f"{side}_embedding", inputs),)
            if state.endswith("_embedding"):
                found[state] = super().output_columns()[state].model_copy(update={"of": of})
            else:
                found[state] = OutputColumn(type="binary", of=of)
                if side == "image" and self._has_grid():
                    found[IMAGE_GRID.name] = OutputColumn(type="binary", of=of)
        return found

    def _source(self, embedding: str, inputs: Mapping[str, InputColumn]) -> str:
        """Name of the input that a side's state is made of."""
        side: Side = "image" if embedding.startswith("image") else "text"
        return next(each for each in (INPUTS[side], f"{side}_activation", embedding) if each in inputs)

    def ended_columns(self) -> tuple[str, ...]:
        """Return the columns that it took of earlier shards; of the last one, also why rows have none."""
        taken = [each.of for each in self.input_columns().values() if isinstance(each, ColumnInput)]
        errors = [f"{self._part(number)}.{ERROR}" for number in range(self.number)] if self._is_last else []
        return (*taken, *errors)

    def parts(self) -> tuple[Servable, ...]:
        """Return itself."""
        return (self,)

    def program(self) -> ServableProgram:
        """Return the program that runs its layers."""
        return self.stage_program(self._shard)
