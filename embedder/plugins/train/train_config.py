"""One training run, described by one TOML file; unknown keys are errors, and nothing heavy is imported."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from embedder.config import RunConfig
from embedder.config_toml.load_config import load
from embedder.config_toml.run_sections import DecodeConfig, Engine, SourceConfig, WebConfig, check_source_names
from embedder.config_toml.sections import ConfigSection, TrackerConfig
from embedder.config_toml.values import toml
from embedder.plugins.train.trainer.train_settings import DistillSettings, LayerChoice, TrainSettings, chosen_layers
from shards.model_config import ModelConfig
from shards.preprocess import PreprocessConfig
from shards.ranges import LayerRange
from shards.towers.registry import DEFAULT_TEXT, DEFAULT_VISION, AnyTextTower, AnyVisionTower
from shards.train_tokenizer import SPECIAL_TOKENS

LAYER_KEYS = ("vision_layers", "text_layers")
MIN_VOCABULARY = len(SPECIAL_TOKENS) + 2


class Architecture(ConfigSection):
    """Fresh model: config.json of a model folder, before training."""

    name: str = Field("trained", min_length=1, description="name that `embedder model info` prints")
    embedding_dim: int = Field(256, ge=1, description="size of the common space")
    projection_bias: bool = Field(False, description="whether the projections into the common space have a bias")
    vision: AnyVisionTower = DEFAULT_VISION
    text: AnyTextTower = DEFAULT_TEXT
    preprocess: PreprocessConfig = PreprocessConfig()

    @model_validator(mode="after")
    def _buildable(self) -> Self:
        try:
            self.as_model()
        except ValidationError as error:
            said = (item["msg"].removeprefix("Value error, ") for item in error.errors())
            raise ValueError("; ".join(said)) from None
        if self.text.num_vocabulary < MIN_VOCABULARY:
            raise ValueError(
                f"text.vocab_size = {self.text.num_vocabulary}: a tokeniser needs at least {MIN_VOCABULARY}; raise it"
            )
        return self

    def as_model(self) -> ModelConfig:
        """Configuration of the model, untrained."""
        return ModelConfig(trained=False, **dict(self))


class ValidationConfig(ConfigSection):
    """Items held out of training to measure retrieval on."""

    source: str | None = Field(None, description="name of the [[source]] that is held out whole")
    fraction: float = Field(0.1, ge=0, lt=1, description="share of the concepts held out, where no source is")
    every_steps: int = Field(200, ge=1, description="steps between two measurements of R@k")
    max_items: int = Field(5000, ge=1, description="items measured on; held-out ones beyond them are left unused")


class KeptLayers(ConfigSection):
    """Layers of a model that a smaller one begins with."""

    vision: LayerChoice = Field("all", description='of the vision tower: "every 2nd", "first 6", or a list of numbers')
    text: LayerChoice = Field("all", description="of the text tower; layers that share weights keep the set")

    @field_validator("vision", "text")
    @classmethod
    def _check_layers(cls, value: LayerChoice) -> LayerChoice:
        chosen_layers(value, None)
        return value


class TeacherConfig(DistillSettings):
    """A larger model whose vectors a student learns from."""

    store: str | None = Field(None, description="store with its vectors of the items; the teacher itself is not run")
    publication: str | None = Field(None, description="run id of an earlier publication of that store")
    store_model: str | None = Field(None, description="name of a further model of that store, instead of the main one")
    model: str | None = Field(None, description="or a model folder; it embeds the items once, into OUT/teacher")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.store is None) == (self.model is None):
            raise ValueError(
                "give `store` for vectors that are there, or `model` to embed the items first; one of the two"
            )
        if self.store is None and (self.publication is not None or self.store_model is not None):
            raise ValueError("`publication` and `store_model` go with `store`; with `model` leave them out")
        return self

    @property
    def settings(self) -> DistillSettings:
        """Weights of the losses."""
        return DistillSettings(**self.model_dump(include=set(DistillSettings.model_fields)))


class TrainConfig(ConfigSection):
    """Settings of one training run."""

    model: str | None = Field(None, description="model folder to start from: local, s3:// or hub id")
    architecture: Architecture | None = Field(
        None, description="or a fresh model, its tokeniser made from the captions"
    )
    layers: LayerChoice | KeptLayers | None = Field(
        None, description='layers of `model` to begin with: "every 2nd", "first 6", or a list of numbers; left out: all'
    )
    teacher: TeacherConfig | None = Field(None, description="larger model whose vectors are learnt from")
    tokenizer: str | None = Field(None, description="tokenizer.json for the fresh model, instead of one made")
    out: str = Field(min_length=1, description="folder for models, checkpoint, metrics and curves")
    source: tuple[SourceConfig, ...] = Field((), description="pairs of image and caption")
    concept: str = Field(
        "item_id", description="column whose equal values mark items that belong together; `caption` is one, too"
    )
    texts: tuple[str, ...] = Field((), description="columns with further captions: a string, or a list of strings")
    tag_sets: tuple[str, ...] = Field((), description="columns with lists of tags; each list is one caption")
    captions_per_picture: int = Field(1, ge=1, description="captions drawn for each image, again in each epoch")
    batch_size: int = Field(256, ge=2, description="images of a step")
    validation: ValidationConfig = ValidationConfig()
    train: TrainSettings = TrainSettings()
    decode: DecodeConfig = DecodeConfig()
    web: WebConfig = WebConfig()
    engine: Engine = Field("auto", description="what decodes: ray, local (this process), or what is faster here")
    num_workers: int = Field(
        1, ge=1, description="processes that train together on Ray, each with the whole model and a share of each batch"
    )
    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description='"auto", "cpu" or "cuda"',
        json_schema_extra={"rule": '"auto", "cpu", "cuda", or one GPU, as "cuda:0"'},
    )
    num_threads: int | None = Field(
        None, ge=1, description="torch threads of each worker; none: all CPUs, or a worker's share of them"
    )
    cache_bytes: int = Field(
        1 << 30, ge=0, description="decoded images kept in memory by one worker; several decode again"
    )
    log_every_steps: int = Field(10, ge=1, description="steps between two lines of metrics")
    checkpoint_every_s: float = Field(
        300.0, gt=0, description="seconds between two checkpoints: the most work that a crash can lose"
    )
    max_reject_fraction: float = Field(0.01, ge=0, le=1, description="above it training ends")
    no_progress_timeout_s: float = Field(
        300.0, gt=0, description="Ray: seconds after which a decode step that finishes nothing ends"
    )
    ray_address: str | None = Field(None, description="Ray cluster to attach to; none starts Ray on this machine")
    tracker: TrackerConfig | None = Field(None, description="MLflow or Weights & Biases")

    @field_validator("train", mode="before")
    @classmethod
    def _layer_ranges(cls, value: object) -> object:
        """In a file, a range of layers is written as [start, stop]."""
        if not isinstance(value, dict):
            return value
        return value | {name: _layer_range(value[name]) for name in LAYER_KEYS if name in value}

    @field_validator("layers")
    @classmethod
    def _known_layers(cls, value: LayerChoice | KeptLayers | None) -> LayerChoice | KeptLayers | None:
        if value is not None and not isinstance(value, KeptLayers):
            chosen_layers(value, None)
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.model is None) == (self.architecture is None):
            raise ValueError(
                "give `model` to continue from a model folder, or [architecture] to start afresh; one of the two"
            )
        if self.tokenizer is not None and self.architecture is None:
            raise ValueError("`tokenizer` goes with [architecture]; a model folder has its own")
        if self.layers is not None and self.model is None:
            raise ValueError("`layers` are those of `model`; with [architecture] write its sizes")
        if self.layers is not None and self.train.what == "layers":
            raise ValueError(
                'train.what = "layers" saves a delta over `model`, and `layers` begins with another one; write '
                'what = "all", or leave `layers` out'
            )
        if not self.source:
            raise ValueError(
                'no [[source]]: write [[source]] and below it path = "...", a place with images and captions'
            )
        check_source_names(self.source)
        names = [source.name for source in self.source]
        if self.validation.source is not None and self.validation.source not in names:
            known = ", ".join(toml(name) for name in names if name is not None) or "none with a name"
            raise ValueError(
                f"validation.source = {toml(self.validation.source)}: there is no [[source]] of that name; there "
                f"{'are' if len(names) > 1 else 'is'} {known}"
            )
        if self.validation.source is not None and len(names) < 2:
            raise ValueError(
                f"validation.source = {toml(self.validation.source)} holds out the only [[source]]; add another to "
                "train on, or write validation.fraction in place of it"
            )
        if self.train.what == "layers" and self.model is None:
            raise ValueError('train.what = "layers" saves a delta over a base; give `model`, not [architecture]')
        self._check_workers()
        if self.train.loss == "concepts":
            raise ValueError('train.loss = "concepts" is not for `embedder train`; write "clip" or "siglip"')
        return self

    @property
    def kept_layers(self) -> KeptLayers | None:
        """Layers of `model` to begin with, by side; None means all."""
        if self.layers is None or isinstance(self.layers, KeptLayers):
            return self.layers
        return KeptLayers(vision=self.layers, text=self.layers)

    def _check_workers(self) -> None:
        if self.num_workers == 1:
            return
        where = f"num_workers = {self.num_workers}"
        if self.engine == "local":
            raise ValueError(f'{where}: several workers need Ray; write engine = "ray", or num_workers = 1')
        if self.batch_size % self.num_workers:
            raise ValueError(f"{where}: batch_size = {self.batch_size} has no equal shares; make it a multiple")
        if self.train.what == "projections":
            raise ValueError(f'{where}: what = "projections" runs the towers once; write num_workers = 1')
        if self.device.startswith("cuda:"):
            raise ValueError(f'{where}: device = "{self.device}" names one GPU; write "cuda", and each worker gets one')


def _layer_range(value: object) -> object:
    """Range that a list of two integers means; anything else is unchanged, so that validation reports it."""
    match value:
        case [int(start), int(stop)] if 0 <= start <= stop:
            return LayerRange(start, stop)
    return value


RUN_ONLY = frozenset(RunConfig.model_fields) - frozenset(TrainConfig.model_fields)
TrainConfig.elsewhere = dict.fromkeys(
    RUN_ONLY, "of a run that embeds: give the file to `embedder embed --config` or `embedder refresh`"
)


def load_train_config(
    path: str | Path | None = None, overrides: Mapping[str, Any] | None = None, settings: Iterable[str] = ()
) -> TrainConfig:
    """Read the configuration of a training run: the file first, then options, then `key=value` texts.

    Args:
        path: a TOML file, or none.
        overrides: values of options by key; those that are None are left out.
        settings: `key=value` texts.

    Raises:
        ConfigError: the file is missing or is no TOML, a key is unknown, or a value breaks its rule.
    """
    return load(TrainConfig, path, overrides, settings).config
