"""Configuration of a run, one TOML file; unknown keys are errors, and nothing heavy is imported.

Devices and dtypes are strings, and no default reads the machine: `"auto"` is resolved when the run starts.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, cast

from pydantic import Discriminator, Field, field_validator, model_validator

from embedder.config_toml.deploy_section import DeployConfig
from embedder.config_toml.load_config import load
from embedder.config_toml.own_code_sections import MetricConfig, StepConfig, check_metrics, check_steps
from embedder.config_toml.run_sections import (
    CaptionsConfig,
    ClusterConfig,
    ComputeDtype,
    DecodeConfig,
    Device,
    Dtype,
    Engine,
    MetadataConfig,
    OnFailure,
    SourceConfig,
    SourcesConfig,
    StageConfig,
    WebConfig,
    check_source_names,
)
from embedder.config_toml.sections import (
    CompareConfig,
    ConfigSection,
    FurtherModelConfig,
    IndexConfig,
    JoinConfig,
    ModelTables,
    ModelUri,
    ServeConfig,
    TrackerConfig,
    check_joins,
    check_models,
    form_of_model,
    of_first,
)
from embedder.errors import ConfigError, check_argument

Function = TypeVar("Function", bound=Callable[..., Any])
Settings = TypeVar("Settings")

OF_TRAINING = (
    "architecture", "cache_bytes", "captions_per_picture", "checkpoint_every_s", "concept", "layers",
    "log_every_steps", "num_workers", "out", "tag_sets", "teacher", "texts", "tokenizer", "train", "validation",
)  # fmt: skip
"""Keys of the configuration of a training run; what else that has is a key of some table here."""


@dataclass(frozen=True)
class SourceSettings:
    """What listing reads."""

    source: tuple[SourceConfig, ...]
    sources: SourcesConfig
    captions: CaptionsConfig
    join: tuple[JoinConfig, ...]
    web: WebConfig
    written: tuple[str, ...]
    """Files that a run writes for its operators, which are no items."""


@dataclass(frozen=True)
class RowSettings:
    """What makes rows of items."""

    decode: DecodeConfig
    metadata: MetadataConfig
    captions: CaptionsConfig
    web: WebConfig
    segment_s: float
    frames_per_segment: int
    frames_from_start: bool
    """Whether the first of a segment's frames is its first, as models of clips take them."""
    step: tuple[StepConfig, ...]
    metric: tuple[MetricConfig, ...]


@dataclass(frozen=True)
class ComputeSettings:
    """What decides where and how stages compute, and what a run's engine waits for."""

    engine: Engine
    device: Device
    dtype: Dtype
    compile: Literal["auto"] | bool
    plan: str | None
    stage: tuple[StageConfig, ...]
    num_stages: int
    fixed_by: str | None
    """Key that fixes the number of stages; None where the configuration leaves it open."""
    batch_size: int | Literal["auto"]
    rows_per_part: int
    ray_address: str | None
    cluster: ClusterConfig
    decode_cpus: float | None
    """CPUs that a decode task reserves, with the user's own steps in it; None leaves them to the run."""
    items_per_task: int | Literal["auto"]
    no_progress_timeout_s: float
    stop_timeout_s: float

    @property
    def settled_dtype(self) -> ComputeDtype:
        """Dtype to compute in; float32, as on CPUs, until `embedder.placement.compute_dtype` has resolved `auto`."""
        return "float32" if self.dtype == "auto" else self.dtype

    @property
    def may_use_gpus(self) -> bool:
        """Whether a stage may compute on a GPU, if there is one."""
        if self.engine == "local" or self.cluster.max_gpus == 0:
            return False
        if not self.stage:
            return self.device != "cpu"
        return any((stage.device or self.device) != "cpu" and stage.num_gpus != 0 for stage in self.stage)

    @property
    def devices(self) -> frozenset[Device]:
        """Devices that stages ask for."""
        return frozenset(stage.device or self.device for stage in self.stage) or frozenset({self.device})


@dataclass(frozen=True)
class RunLimits:
    """What guards judge by."""

    max_reject_fraction: float
    min_rejects: int
    max_attempts: int
    max_retire_fraction: float
    min_vector_spread: float
    min_vector_directions: float
    max_retrieval_drop: float
    compare: CompareConfig


@dataclass(frozen=True)
class ObserveSettings:
    """What operators see of a run."""

    store: str | None
    log_file: str | None
    runs_file: str | None
    metrics_file: str | None
    metrics_address: str | None
    traces: str | None
    tracker: TrackerConfig | None
    on_failure: OnFailure
    given: Mapping[str, Any]
    """All that the configuration sets, for a tracker."""


class RunConfig(ConfigSection):
    """Settings of one run."""

    elsewhere: ClassVar[Mapping[str, str]] = dict.fromkeys(
        OF_TRAINING, "of a training run: give the file to `embedder train`"
    )

    model: Annotated[ModelUri | ModelTables, Discriminator(form_of_model)] | None = Field(
        None, description="model folder: local, s3:// or hub id; or several models, as [[model]]"
    )
    store: str | None = Field(None, description="folder or URI that holds the results")
    source: tuple[SourceConfig, ...] = ()
    sources: SourcesConfig = SourcesConfig()
    captions: CaptionsConfig = CaptionsConfig()
    join: tuple[JoinConfig, ...] = Field((), description="tables whose rows belong to the items")
    stage: tuple[StageConfig, ...] = Field((), description="one entry for each stage, or none")
    step: tuple[StepConfig, ...] = Field((), description="functions of your own, in the order that they run in")
    metric: tuple[MetricConfig, ...] = Field((), description="figures of the rows, computed when a run ends")
    decode: DecodeConfig = DecodeConfig()
    metadata: MetadataConfig = MetadataConfig()
    web: WebConfig = WebConfig()
    plan: str | None = Field(
        default_factory=lambda known: of_first(known.get("model"), "plan"),
        description="a plan file made by `embedder plan --out`; else planned at the start",
        json_schema_extra={"default": "none, or that of the first [[model]]"},
    )
    dtype: Dtype = Field(
        "auto",
        description="compute dtype. auto: that of the store, if it exists, or of the plan file; else bfloat16 on GPUs "
        "of compute capability 8.0 and up, float16 on older ones, float32 on CPUs. int8 holds only for the weights. "
        "Embeddings are float32",
    )
    vectors: Literal["float32", "float16"] | None = Field(
        None,
        description="precision in which vectors are recorded. float16: rounded, as soon as a gate on the published "
        "ones allows it, and in less than half of the bytes. Left out: as the store does, and float32 in a new one",
        json_schema_extra={"default": "as the store does"},
    )
    compile: Literal["auto"] | bool = Field(
        "auto",
        description="compile the layers of stages with torch's compiler. auto: those on GPUs, in runs long enough to "
        "repay it. int8 is never compiled",
    )
    engine: Engine = Field("auto", description="ray, local (one process), or what is faster here")
    device: Device = Field(
        "auto", description="of stages: cuda on a GPU that Ray lends, cpu without one; auto takes a GPU if there is any"
    )
    num_stages: int = Field(
        default_factory=lambda known: len(known.get("stage", ())) or of_first(known.get("model"), "stages") or 3,
        ge=1,
        description="shards that the model is cut into; left out: as many as there are [[stage]], or 3",
        json_schema_extra={"default": "3, or the number of [[stage]]"},
    )
    batch_size: int | Literal["auto"] = Field("auto", description="rows of a stage's batches")
    rows_per_part: int = Field(512, ge=1, description="rows of one part file; also the step of progress")
    segment_s: float = Field(5.0, gt=0, allow_inf_nan=False, description="length of one video segment, in seconds")
    frames_per_segment: int = Field(
        4,
        ge=1,
        description="frames embedded of each segment, spread evenly; without effect with a model of clips, which takes "
        "its own number",
    )
    max_reject_fraction: float = Field(
        0.01, ge=0, le=1, description="share of rejects above which nothing is published; later, of 100 items at least"
    )
    min_rejects: int = Field(
        10,
        ge=1,
        description="with fewer rejects a run publishes, unless max_reject_fraction is 0 or a first run embeds nothing",
    )
    max_attempts: int = Field(
        5, ge=1, description="attempts at an item with a transient error; later ones only on demand"
    )
    max_retire_fraction: float = Field(0.05, ge=0, le=1, description="a listing that lost more is refused")
    min_vector_spread: float = Field(1e-4, ge=0, description="least spread of the new vectors to be published")
    min_vector_directions: float = Field(
        1.1, ge=0, description="least number of directions of the new vectors; 1 is a line"
    )
    max_retrieval_drop: float = Field(0.25, ge=0, le=1, description="share of the published R@10 that may be lost")
    compare: CompareConfig = CompareConfig()
    index: IndexConfig = IndexConfig()
    no_progress_timeout_s: float = Field(300.0, gt=0, description="seconds until a run that finishes nothing ends")
    stop_timeout_s: float = Field(
        10.0,
        ge=0,
        le=86_400,
        description="seconds that items inside the stages may take after Ctrl-C, SIGTERM or SIGHUP",
    )
    fast_start: bool = Field(
        True, description="patch libraries to start and run faster; EMBEDDER_FAST_START=0 switches it off everywhere"
    )
    ray_address: str | None = Field(None, description="Ray cluster to attach to; none starts Ray on this machine")
    cluster: ClusterConfig = ClusterConfig()
    publish_every_s: float | None = Field(
        None, gt=0, description="seconds between two publications of a run in progress; left out: one, at its end"
    )
    deletion_vectors: Literal["auto"] | bool = Field(
        "auto",
        description="mark rows that leave in the tables instead of rewriting their part files; auto: where a run "
        "with true has begun it, as some readers refuse such tables",
    )
    prices: dict[str, Annotated[float, Field(ge=0)]] = Field(
        {}, description="price of an hour of one device, by its type: CPU (a core), L4, A100"
    )
    currency: str | None = Field(
        None, pattern=r"^\S{1,8}$", description="currency of all prices, as EUR; costs are reported in it"
    )
    log_file: str | None = Field(None, description="file to append the log to; else one in the run's folder")
    runs_file: str | None = Field(None, description="file to append a JSON line for each run to; else STORE/runs.jsonl")
    metrics_file: str | None = Field(None, description="Prometheus text file to write when a run ends")
    metrics_address: str | None = Field(
        None,
        pattern=r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]*):\d{1,5}$",
        description="HOST:PORT that answers Prometheus during a run; :9477 only for this machine",
        json_schema_extra={"rule": "HOST:PORT, as 0.0.0.0:9477, or :9477"},
    )
    traces: str | None = Field(
        None,
        description="OpenTelemetry traces: address of a collector, as http://127.0.0.1:4318, or a file to append to",
    )
    tracker: TrackerConfig | None = Field(None, description="MLflow or Weights & Biases")
    on_failure: OnFailure = OnFailure()
    serve: ServeConfig = ServeConfig()
    deploy: DeployConfig = DeployConfig()

    @field_validator("store")
    @classmethod
    def _not_here(cls, store: str | None) -> str | None:
        if store == "":
            raise ValueError("must not be empty, which would be the working directory; write a path or a URI")
        return store

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.stage and len(self.stage) != self.num_stages:
            raise ValueError(
                f"{len(self.stage)} [[stage]] entries for num_stages = {self.num_stages}; "
                "write one entry for each stage, or none"
            )
        for index, stage in enumerate(self.stage):
            if stage.num_gpus == 0 and (stage.device or self.device) == "cuda":
                raise ValueError(
                    f'stage {index}: device = "cuda" with num_gpus = 0 reserves no GPU to compute on; leave num_gpus '
                    'out, or write device = "cpu"'
                )
        check_source_names(self.source)
        check_joins(self.join, {source.name for source in self.source})
        check_steps(self.step)
        check_metrics(self.metric)
        if isinstance(self.model, tuple):
            check_models(self.model, self.plan, self.num_stages)
        if self.batch_size != "auto" and self.batch_size < 1:
            raise ValueError(f'batch_size = {self.batch_size}: write "auto" or a number of rows from 1 up')
        return self

    @property
    def listed(self) -> "SourceSettings":
        """What listing reads."""
        written = (self.log_file, self.runs_file, self.metrics_file)
        return self._settings(SourceSettings, written=tuple(name for name in written if name))

    @property
    def rows(self) -> "RowSettings":
        """What makes rows of items."""
        return self._settings(RowSettings, frames_from_start=False)

    @property
    def compute(self) -> "ComputeSettings":
        """What decides where and how stages compute."""
        decode_cpus = self.decode.num_cpus
        of_steps = max([step.num_cpus for step in self.step if step.where == "after_decode"], default=0.0)
        if of_steps > max(decode_cpus or 1.0, 1.0):
            decode_cpus = of_steps
        fixed_by = "[[stage]]" if self.stage else "num_stages" if "num_stages" in self.model_fields_set else None
        return self._settings(
            ComputeSettings, decode_cpus=decode_cpus, items_per_task=self.decode.items_per_task, fixed_by=fixed_by
        )

    @property
    def limits(self) -> "RunLimits":
        """What guards judge by."""
        return self._settings(RunLimits)

    @property
    def observing(self) -> "ObserveSettings":
        """What operators see of a run."""
        given = self.model_dump(mode="json", exclude_unset=True, exclude_none=True, exclude={"tracker"})
        return self._settings(ObserveSettings, given=given)

    def _settings(self, kind: type[Settings], **derived: Any) -> Settings:
        """Pick the keys of a part; those that are no keys of the configuration are given."""
        names = (field.name for field in fields(cast(Any, kind)))
        return kind(**{name: derived[name] if name in derived else getattr(self, name) for name in names})

    @property
    def required_store(self) -> str:
        """Address of the store; ConfigError if the configuration names none."""
        if self.store is None:
            raise ConfigError("no store: give --store URI, or `store` in the configuration file")
        return self.store

    @property
    def main_model(self) -> str | None:
        """Address of the main model's folder; None where the configuration names none."""
        return self.model[0].address if isinstance(self.model, tuple) else self.model

    @property
    def further_models(self) -> tuple[FurtherModelConfig, ...]:
        """Models in addition to the main one."""
        return self.model[1:] if isinstance(self.model, tuple) else ()

    @property
    def model_sections(self) -> tuple[dict[str, Any], ...]:
        """Sections of the further models, as `embedder.servables.make_servable` takes them."""
        return tuple(model.settings() for model in self.further_models)

    @property
    def required_model(self) -> str:
        """Address of the main model's folder; ConfigError if the configuration names none."""
        if self.main_model is None:
            raise ConfigError("no model: give --model DIR, or `model` in the configuration file")
        return self.main_model


def load_config(
    path: str | Path | None = None, overrides: Mapping[str, Any] | None = None, settings: Iterable[str] = ()
) -> RunConfig:
    """Read the configuration of a run: the file first, then options, then `key=value` texts.

    Args:
        path: a TOML file, or none.
        overrides: values by key, as `{"store": "runs/demo"}`; those that are None are left out.
        settings: `key=value` texts; the key may be dotted (`decode.timeout_s=5`), the value is read as TOML.

    Raises:
        ConfigError: the file is missing or is no TOML, a key is unknown, or a value breaks its rule; of several such
            mistakes each has a line.
    """
    return load(RunConfig, path, overrides, settings).config


def with_fast_start(function: Function) -> Function:
    """Let a public function whose first argument is a run's configuration follow its `fast_start`; a decorator."""

    @wraps(function)
    def follow(config: RunConfig, *args: Any, **options: Any) -> Any:
        from shards.compat import fast_start

        check_argument(f"embedder.{function.__name__}: config", config, RunConfig, "one of embedder.load_config")
        with fast_start(config.fast_start):
            return function(config, *args, **options)

    return cast(Function, follow)
