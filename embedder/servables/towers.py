"""Kind `towers`: the cuttable towers of a model folder, uncut in one process, using the same stage code as a run."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Literal, Self

import numpy as np
import pyarrow as pa
from pydantic import Field, model_validator

from embedder.batch_schema import IMAGE_GRID, TRACE
from embedder.config_toml.run_sections import ComputeDtype
from embedder.errors import ConfigError
from embedder.media.resize import ResizeSpec
from embedder.servables.order import ERROR
from embedder.servables.prepare import GRID
from embedder.servables.program import ServableProgram
from embedder.servables.servable import Servable, absolute_path
from embedder.servables.servable_columns import (
    ADDRESS,
    ColumnInput,
    InputColumn,
    OutputColumn,
    TokensInput,
    TowerPixelsInput,
)
from embedder.servables.servable_errors import ServableError
from embedder.storage.model_download import resolve_model
from embedder.store.tables.arrow_tensors import pack_flat
from shards.fingerprint import model_fingerprint, short_hash
from shards.model_config import CONFIG_FILE, TOKENIZER_FILE, ModelConfig, load_model_config
from shards.model_errors import ModelError
from shards.plan import PlannedStage, ShardPlan, check_plan, plan_shards
from shards.preprocess import UNHASHED
from shards.shard_specs import ShardSpec, text_only, vision_only, whole_model
from shards.weights import find_weights

Side = Literal["image", "text"]
INPUTS: dict[Side, str] = {"image": "pixels", "text": "token_ids"}
TOWERS: dict[Side, str] = {"image": "vision", "text": "text"}


class TowersServable(Servable):
    """Towers of a model folder: `image_embedding` and `text_embedding`, L2-normalised, for the inputs of each row."""

    kind: Literal["towers"] = "towers"
    sides: tuple[Side, ...] = Field(
        ("image", "text"), min_length=1, description="what is embedded; only the towers that it takes are loaded"
    )
    image_of: str | None = Field(None, pattern=ADDRESS, description="column with the images; left out: the item's own")
    text_of: str | None = Field(
        None, pattern=ADDRESS, description="column with the texts; left out: the item's caption"
    )
    dtype: ComputeDtype = Field("float32", description="compute dtype; int8 holds only for the weights")
    stages: int = Field(1, ge=1, description="shards that the towers are cut into, each in its own actors")
    plan: str | None = Field(
        None, description="plan of `embedder plan --out` that says how, and on what, in place of it"
    )

    UNHASHED: ClassVar[frozenset[str]] = Servable.UNHASHED | {"stages", "plan"}

    @model_validator(mode="after")
    def _check_place(self) -> Self:
        if self.python is not None:
            raise ValueError("python is set; the kind towers runs only in this interpreter, leave it out")
        for key in ("timeout_s", "load_timeout_s"):
            if getattr(self, key) is not None:
                raise ValueError(f"{key} is set; the kind towers has no process of its own to be ended, leave it out")
        if self.plan is not None and self.stages != 1:
            raise ValueError(f"plan and stages = {self.stages} both say how the towers are cut; write one")
        return self

    def absolute(self) -> Self:
        """Return it with absolute paths, including that of its plan."""
        found = super().absolute()
        return found if self.plan is None else found.model_copy(update={"plan": absolute_path(self.plan)})

    @property
    def _folder(self) -> Path:
        return local_folder(self.uri)

    @property
    def _config(self) -> ModelConfig:
        config = load_model_config(self._folder)  # its clips are the means of their frames' vectors
        return config.model_copy(update={"preprocess": config.preprocess.model_copy(update={"clips": None})})

    def _sides(self) -> list[Side]:
        found = [side for side in self.sides if TOWERS[side] in self._config.towers]
        named = {"image": self.image_of, "text": self.text_of}
        missing = [side for side in self.sides if side not in found and (named[side] or len(self.sides) == 1)]
        if missing or not found:
            raise ServableError(
                f"{self.where()}: the model has no tower for side {missing[0]!r}; write sides = {found or list(INPUTS)}"
            )
        return found

    @property
    def clip_frames(self) -> int | None:
        """Frames of a clip, if its images are such."""
        return self._config.clip_frames if "image" in self._sides() else None

    def input_columns(self) -> Mapping[str, InputColumn]:
        """Return pixels and token ids as the towers take them; a row needs at least one of the two."""
        config, inputs = self._config, dict[str, InputColumn]()
        if config.preprocess.joins_captions and "image" in self._sides():
            raise ServableError(
                f"{self.where()}: {self.uri} embeds a picture with its caption, which only the store's main model can; "
                "import it again without --join-captions, or make it the main one"
            )
        for side in self._sides():
            if side == "image":
                rule = ResizeSpec.of(config.preprocess, config.required_vision)
                inputs["pixels"] = TowerPixelsInput(of=self.image_of, optional=True, rule=rule)
            else:
                inputs["token_ids"] = TokensInput(
                    of=self.text_of,
                    optional=True,
                    tokenizer=str(self._folder / TOKENIZER_FILE),
                    max_tokens=config.preprocess.max_caption_tokens,
                    end_id=config.required_text.end_id,
                    prompt=config.preprocess.caption_prompt,
                )
        return inputs

    def output_columns(self) -> Mapping[str, OutputColumn]:
        """Return an embedding for each side."""
        shape = (self._config.vector_dim,)
        return {f"{side}_embedding": OutputColumn(shape=shape, of=(INPUTS[side],)) for side in self._sides()}

    def files(self) -> list[Path]:
        """Return configuration, weights and tokeniser."""
        tokenizer = [self._folder / TOKENIZER_FILE] if "text" in self._sides() else []
        return [self._folder / CONFIG_FILE, *tokenizer, *sorted(set(find_weights(self._folder).values()))]

    def fingerprint(self) -> str:
        """Hash the weights, towers and preprocessing as a run does; the compute dtype doesn't count."""
        preprocess = self._config.preprocess.model_dump_json(exclude_defaults=True, exclude=UNHASHED)
        tokenizer = (self._folder / TOKENIZER_FILE).read_bytes() if "text" in self._sides() else b""
        sides = ",".join(self._sides())
        parts = [model_fingerprint(self._folder).encode(), preprocess.encode(), tokenizer, sides.encode()]
        return short_hash(parts)

    def parts(self) -> tuple[Servable, ...]:
        """Return a part for each shard of the cut."""
        if self.stages == 1 and self.plan is None:
            return (self,)
        return cut_towers(self, self._config, self._sides())

    def program(self) -> ServableProgram:
        """Return the program that runs the towers through `embedder.steps.stage`."""
        return self.stage_program(whole_shard(self._config, self._sides()))

    def stage_program(self, shard: ShardSpec) -> ServableProgram:
        """Return the program that runs some of the layers."""
        settings = {"folder": str(self._folder), "shard": shard, "outputs": [*self.output_columns()]}
        return ServableProgram(__name__, "TowersProgram", settings | {"dtype": self.dtype, "rows": self.batch_size})


@lru_cache(maxsize=16)
def local_folder(uri: str) -> Path:
    """Find a model folder, downloading it if needed, once per process; raises `ModelError` if that fails."""
    return resolve_model(uri).absolute()


class TowersProgram:
    """Towers, or some of their layers, as one stage of a run holds them."""

    def __init__(self, folder: str, shard: ShardSpec, outputs: list[str], dtype: str, rows: int) -> None:
        """Store what to load; `outputs` are the columns to return: of the stage, or input columns passed through."""
        self.folder, self.shard, self.outputs, self.dtype, self.rows = folder, shard, outputs, dtype, rows

    def load(self, device: str, num_threads: int) -> None:
        """Load the weights."""
        from embedder.steps.stage import TowerStage
        from embedder.steps.stage_spec import StageSpec

        spec = StageSpec(0, self.folder, self.shard, self.dtype, device, num_threads, (self.rows,))
        self._stage = TowerStage(spec).load()

    def __call__(self, batch: pa.RecordBatch) -> pa.Table:
        """Compute a batch."""
        columns = {name: batch.column(name) for name in batch.schema.names if not name.endswith(GRID)}
        if "pixels" + GRID in batch.schema.names:
            columns[IMAGE_GRID.name] = batch.column("pixels" + GRID)
        if "token_ids" in columns:
            ids = columns["token_ids"]
            sizes_bytes = np.diff(ids.offsets.to_numpy()).astype(np.int64) * 4
            columns["token_ids"] = pack_flat(ids.flatten().to_numpy(), sizes_bytes)
        table = pa.table({**columns, "trace": pa.nulls(batch.num_rows, TRACE)})
        return self._stage(table).select(self.outputs)


def whole_shard(config: ModelConfig, sides: list[Side]) -> ShardSpec:
    """Make the shard with all layers of some sides."""
    if len(sides) == len(config.towers):
        return whole_model(config)
    return vision_only(config) if sides == ["image"] else text_only(config)


def cut_towers(whole: TowersServable, config: ModelConfig, sides: list[Side]) -> tuple[Servable, ...]:
    """Cut towers by their plan, or into shards of equal work.

    Raises a ConfigError for a plan that is missing or of other weights, a ServableError if there are too few layers.
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
    """Return the resources of a stage in a plan for a fleet, as keys of a servable; empty if the plan has none."""
    if stage.num_gpus is None:
        return {}
    found = {"replicas": stage.num_replicas, "num_gpus": stage.num_gpus, "memory_bytes": stage.memory_bytes}
    if not stage.num_gpus:
        found["num_cpus"] = stage.num_threads
    return {key: value for key, value in found.items() if value is not None}


def read_plan(path: str, folder: Path, fingerprint: str, dtype: str | None) -> ShardPlan:
    """Read the plan of the model in `folder`, whose weights have the fingerprint; a dtype of None takes the plan's.

    Raises a ConfigError if the file is missing, or made for other weights or another dtype; a shards.ModelError if it
    is no plan.
    """
    try:
        plan = ShardPlan.from_json(Path(path).read_bytes())
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
    """Shard of cut towers: takes outputs of decode or of earlier shards; the last one returns all embeddings."""

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
        """Return the number of the previous shard that computes the side; None if the side begins here."""
        return max((number for number in range(self.number) if self._handles(side, number)), default=None)

    def _state(self, side: Side, number: int) -> str:
        """Return the name of a shard's output for a side: activations, or the embedding at the end of its tower."""
        depth = self._config.num_layers[TOWERS[side]]
        is_whole = self.shards[number].layers_of(TOWERS[side]).stop == depth
        return f"{side}_embedding" if is_whole else f"{side}_activation"

    def _part(self, number: int) -> str:
        return self.of_model if number == len(self.shards) - 1 else f"{self.of_model}-{number}"

    def _has_grid(self) -> bool:
        declared = super().input_columns().get(INPUTS["image"])
        return isinstance(declared, TowerPixelsInput) and declared.rule.mode == "patches"

    def input_columns(self) -> Mapping[str, InputColumn]:
        """Return decode's columns for the sides that begin here, and the earlier shards' outputs for the others."""
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
        """Return the state of each side that is computed here; for the last shard, the embeddings of all sides."""
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
        """Return the name of the input that a side's state is made from."""
        side: Side = "image" if embedding.startswith("image") else "text"
        return next(each for each in (INPUTS[side], f"{side}_activation", embedding) if each in inputs)

    def ended_columns(self) -> tuple[str, ...]:
        """Return the columns that it took from earlier shards; for the last one, also the error columns of rows."""
        taken = [each.of for each in self.input_columns().values() if isinstance(each, ColumnInput)]
        errors = [f"{self._part(number)}.{ERROR}" for number in range(self.number)] if self._is_last else []
        return (*taken, *errors)

    def parts(self) -> tuple[Servable, ...]:
        """Return itself."""
        return (self,)

    def program(self) -> ServableProgram:
        """Return the program that runs its layers."""
        return self.stage_program(self._shard)
