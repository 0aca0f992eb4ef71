"""Kind `towers`: the cuttable towers of a model folder, whole in one process, through the same stage as a run's."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Literal, Self

import numpy as np
import pyarrow as pa
from pydantic import Field, model_validator

from embedder.batch_schema import IMAGE_GRID, TRACE
from embedder.config import ComputeDtype
from embedder.media.resize import ResizeSpec
from embedder.servables.base import Servable, absolute_path
from embedder.servables.columns import ADDRESS, InputColumn, OutputColumn, TokensInput, TowerPixelsInput
from embedder.servables.errors import ServableError
from embedder.servables.prepare import GRID
from embedder.servables.program import ServableProgram
from embedder.storage.model_download import resolve_model
from embedder.store.arrow_tensors import pack_flat
from shards.config import CONFIG_FILE, TOKENIZER_FILE, ModelConfig, load_model_config
from shards.fingerprint import model_fingerprint, short_hash
from shards.ranges import ShardSpec, text_only, vision_only, whole_model
from shards.weights import find_weights

Side = Literal["image", "text"]
INPUTS: dict[Side, str] = {"image": "pixels", "text": "token_ids"}
TOWERS: dict[Side, str] = {"image": "vision", "text": "text"}


class TowersServable(Servable):
    """Towers of a model folder: `image_embedding` and `text_embedding`, L2-normalised, of what each row has."""

    kind: Literal["towers"] = "towers"
    sides: tuple[Side, ...] = Field(
        ("image", "text"), min_length=1, description="what is embedded; only the towers that it takes are loaded"
    )
    image_of: str | None = Field(None, pattern=ADDRESS, description="column with the images; left out: the item's own")
    text_of: str | None = Field(
        None, pattern=ADDRESS, description="column with the texts; left out: the item's caption"
    )
    dtype: ComputeDtype = Field("float32", description="compute dtype; int8 holds for the weights alone")
    stages: int = Field(1, ge=1, description="shards that the towers are cut into, each in actors of its own")
    plan: str | None = Field(
        None, description="plan of `embedder plan --out` that says how, and on what, in place of it"
    )

    UNHASHED: ClassVar[frozenset[str]] = Servable.UNHASHED | {"stages", "plan"}

    @model_validator(mode="after")
    def _here(self) -> Self:
        if self.python is not None:
            raise ValueError("python is set; the kind towers runs in this interpreter alone, leave it out")
        for key in ("timeout_s", "load_timeout_s"):
            if getattr(self, key) is not None:
                raise ValueError(f"{key} is set; the kind towers has no process of its own to be ended, leave it out")
        if self.plan is not None and self.stages != 1:
            raise ValueError(f"plan and stages = {self.stages} both say how the towers are cut; write one")
        return self

    def absolute(self) -> Self:
        """Return it with absolute paths, of its plan, too."""
        found = super().absolute()
        return found if self.plan is None else found.model_copy(update={"plan": absolute_path(self.plan)})

    @property
    def _folder(self) -> Path:
        return local_folder(self.uri)

    @property
    def _config(self) -> ModelConfig:
        return load_model_config(self._folder)

    def _sides(self) -> list[Side]:
        """Sides that are asked for and that the model has a tower for."""
        found = [side for side in self.sides if TOWERS[side] in self._config.towers]
        named = {"image": self.image_of, "text": self.text_of}
        missing = [side for side in self.sides if side not in found and (named[side] or len(self.sides) == 1)]
        if missing or not found:
            raise ServableError(
                f"{self.where()}: the model has no tower for side {missing[0]!r}; write sides = {found or list(INPUTS)}"
            )
        return found

    def input_columns(self) -> Mapping[str, InputColumn]:
        """Return pixels and token ids as the towers take them; a row needs one of the two."""
        config, inputs = self._config, dict[str, InputColumn]()
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
                )
        return inputs

    def output_columns(self) -> Mapping[str, OutputColumn]:
        """Return an embedding for each side."""
        shape = (self._config.embedding_dim,)
        return {f"{side}_embedding": OutputColumn(shape=shape, of=(INPUTS[side],)) for side in self._sides()}

    def files(self) -> list[Path]:
        """Return configuration, weights and tokeniser."""
        tokenizer = [self._folder / TOKENIZER_FILE] if "text" in self._sides() else []
        return [self._folder / CONFIG_FILE, *tokenizer, *sorted(set(find_weights(self._folder).values()))]

    def fingerprint(self) -> str:
        """Hash the weights and the towers as a run does, and the preprocessing; the compute dtype doesn't count."""
        preprocess = self._config.preprocess.model_dump_json(exclude_defaults=True)
        tokenizer = (self._folder / TOKENIZER_FILE).read_bytes() if "text" in self._sides() else b""
        sides = ",".join(self._sides())
        parts = [model_fingerprint(self._folder).encode(), preprocess.encode(), tokenizer, sides.encode()]
        return short_hash(parts)

    def parts(self) -> tuple[Servable, ...]:
        """Return a part for each shard of the cut."""
        if self.stages == 1 and self.plan is None:
            return (self,)
        from embedder.servables.tower_parts import cut_towers

        return cut_towers(self, self._config, self._sides())

    def program(self) -> ServableProgram:
        """Return the program that runs the towers through `embedder.steps.stage`."""
        return self.stage_program(whole_shard(self._config, self._sides()))

    def stage_program(self, shard: ShardSpec) -> ServableProgram:
        """Return the program that runs some of the layers.

        Args:
            shard: the layers.
        """
        settings = {"folder": str(self._folder), "shard": shard, "outputs": [*self.output_columns()]}
        return ServableProgram(__name__, "TowersProgram", settings | {"dtype": self.dtype, "rows": self.batch_size})


@lru_cache(maxsize=16)
def local_folder(uri: str) -> Path:
    """Find a model folder, downloading it where it isn't local; once in a process, and anew in another one.

    Raises:
        ModelError: there is no such folder, or it can't be downloaded.
    """
    return resolve_model(uri).absolute()


class TowersProgram:
    """Towers, or some layers of them, as one stage of a run holds them."""

    def __init__(self, folder: str, shard: ShardSpec, outputs: list[str], dtype: str, rows: int) -> None:
        """Note what to load.

        Args:
            folder: of the model.
            shard: its layers.
            outputs: columns that are returned: of the stage, or as they were given.
            dtype: compute dtype.
            rows: of a batch.
        """
        self.folder, self.shard, self.outputs, self.dtype, self.rows = folder, shard, outputs, dtype, rows

    def load(self, device: str, num_threads: int) -> None:
        """Load the weights.

        Args:
            device: torch's name of a device.
            num_threads: torch's threads.
        """
        from embedder.steps.stage import Stage
        from embedder.steps.stage_actor import StageSpec

        self._stage = Stage(StageSpec(0, self.folder, self.shard, self.dtype, device, num_threads, (self.rows,)))

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
    """Make the shard with all layers of some sides.

    Args:
        config: of the model.
        sides: that are embedded.
    """
    if len(sides) == len(config.towers):
        return whole_model(config)
    return vision_only(config) if sides == ["image"] else text_only(config)
