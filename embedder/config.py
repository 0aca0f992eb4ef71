"""Configuration of a run, one TOML file; unknown keys are errors, and nothing heavy is imported.

Devices and dtypes are strings, and no default reads the machine: `"auto"` is resolved when the run starts.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, cast

from pydantic import AfterValidator, Discriminator, Field, create_model, field_validator, model_validator

from embedder.config_toml.deploy_section import DeployConfig
from embedder.config_toml.load_config import load
from embedder.config_toml.sections import (
    CompareConfig,
    ConfigSection,
    FurtherModelConfig,
    IndexConfig,
    JoinConfig,
    MetricConfig,
    ModelTables,
    ModelUri,
    ServeConfig,
    StepConfig,
    TrackerConfig,
    check_joins,
    check_metrics,
    check_models,
    check_steps,
    form_of_model,
    plan_of,
    stages_of,
)
from embedder.errors import ConfigError, check_argument
from embedder.medium_columns import GROUPS, check_medium_name, chosen_columns

ComputeDtype = Literal["float32", "bfloat16", "float16", "int8"]
Dtype = Literal["auto", "float32", "bfloat16", "float16", "int8"]
Engine = Literal["auto", "ray", "local"]
Device = Literal["auto", "cpu", "cuda"]
Colour = Literal["srgb", "raw"]
MediumName = Annotated[str, AfterValidator(check_medium_name)]
SourceKind = Literal["auto", "files", "table", "webdataset"]

Function = TypeVar("Function", bound=Callable[..., Any])
Settings = TypeVar("Settings")

NUM_STAGES = 3
OF_TRAINING = (
    "architecture",
    "cache_bytes",
    "captions_per_picture",
    "checkpoint_every_s",
    "concept",
    "layers",
    "log_every_steps",
    "num_workers",
    "out",
    "tag_sets",
    "teacher",
    "texts",
    "tokenizer",
    "train",
    "validation",
)
"""Keys of the configuration of a training run; what else that has is a key of some table here."""


class Columns(ConfigSection):
    """Names of a table's columns; a column that is not named is not read."""

    id: str | None = Field(None, description="stable id of the row; becomes item_id")
    image: str | None = Field(None, description="image or video: bytes, a struct with `bytes`, or a URI")
    caption: str | None = Field(None, description="caption, a string")


class SourceConfig(ConfigSection):
    """Source of items: a folder, a table or tars."""

    path: str = Field(description="folder, file, glob or URI (local, s3://, gs://)")
    name: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9._-]+$",
        description="stands before each item_id: `name:id`",
        json_schema_extra={"rule": "letters, digits, . _ and - only"},
    )
    kind: SourceKind = Field("auto", description="files, table (Parquet, CSV, JSONL, Delta) or webdataset (tars)")
    columns: Columns = Columns()
    carryover: tuple[str, ...] = Field((), description="columns copied untouched into the embeddings table")
    include: tuple[str, ...] = Field((), description="of files, only those that match one of these patterns")
    exclude: tuple[str, ...] = Field((), description="of files, none that matches one of these patterns")


class SourcesConfig(ConfigSection):
    """How a run tells that an item has changed, of all sources."""

    changed_by: Literal["size+time", "size+mtime", "etag", "content"] = Field(
        "size+time",
        description="size+time: by size and the times of modification and change of a file, or by an object's ETag; "
        "size+mtime: without the change time, which some backups touch; etag: the same of buckets, refused for other "
        "sources; content: each run reads all",
    )
    verify_share: float = Field(
        0.0, ge=0, le=1, description="share of the unchanged items that each refresh reads to compare their content"
    )


CaptionPlace = Literal["sidecar", "xmp", "iptc", "exif", "takeout", "imagefolder", "clip"]

_PLACES = Field(
    ("sidecar",),
    description="places of captions, in order: the first one that has any gives it. sidecar: `.txt` or `.json` of the "
    "same name; takeout: Google Takeout's `.json`; imagefolder: `metadata.jsonl`, `.csv` or `.parquet`; xmp: an `.xmp` "
    "file, else the image's own XMP; iptc and exif: in the image; clip: tags of a video",
)
_FIELDS: dict[str, Any] = {"from": (tuple[CaptionPlace, ...], _PLACES)}  # a word of Python's, so no field by itself
_CaptionPlaces = create_model("_CaptionPlaces", __base__=ConfigSection, **_FIELDS)


class CaptionsConfig(_CaptionPlaces):
    """Captions of images and videos: in files beside them, and in their metadata."""

    alone: Literal["auto"] | bool = Field(
        "auto",
        description="embed captions that belong to no image or video. auto: only those that the store has already, and "
        "all with a model for texts alone",
    )
    columns: tuple[str, ...] = Field(
        (), description="keys of the `.json` files that are copied into the embeddings table, as carryover is"
    )
    languages: tuple[str, ...] = Field(
        (), description='languages to take of XMP\'s alternatives, as "en"; left out: what is marked as the default'
    )

    @property
    def places(self) -> tuple[CaptionPlace, ...]:
        """Value of the key `from`."""
        found: tuple[CaptionPlace, ...] = getattr(self, "from")
        return found

    @model_validator(mode="after")
    def _check_places(self) -> Self:
        if len(set(self.places)) < len(self.places):
            raise ValueError("from names a place twice; name each once, the one that counts most first")
        return self


def check_source_names(sources: tuple[SourceConfig, ...]) -> None:
    """Raise ValueError where several sources don't have a name each."""
    names = {source.name for source in sources}
    if len(sources) > 1 and (None in names or len(names) < len(sources)):
        raise ValueError("several [[source]] entries need a `name` each, all different: it stands before the ids")


class Replicas(ConfigSection):
    """Number of actors of one stage; Ray Data grows and shrinks the pool between the two."""

    min: int = Field(1, ge=1, description="actors that start with the run")
    max: int = Field(1, ge=1, description="actors that there may be; lowered to what the CPUs and GPUs hold")

    @classmethod
    def of(cls, number: int) -> Self:
        """Return bounds that leave one number."""
        return cls(min=number, max=number)

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.max < self.min:
            raise ValueError(f"max ({self.max}) is below min ({self.min}); raise max or lower min")
        return self


class StageConfig(ConfigSection):
    """Resources of one stage; keys that are left out are filled in when the run starts."""

    replicas: Replicas | Literal["auto"] = Field(
        "auto", description="auto: as the plan says, else what the nodes that are there have room for"
    )
    num_cpus: float | None = Field(None, ge=0, description="CPUs reserved by each replica, fractions allowed")
    num_gpus: float | None = Field(
        None,
        ge=0,
        description="GPUs reserved by each replica, a fraction of one or whole; left out: an even share",
    )
    device: Device | None = Field(
        None, description="device to compute on; left out: the run's `device`. num_gpus is reserved with any"
    )
    num_threads: int | None = Field(None, ge=1, description="torch threads of each replica")

    @field_validator("num_gpus")
    @classmethod
    def _countable(cls, num_gpus: float | None) -> float | None:
        if num_gpus and (num_gpus < 1e-4 or (num_gpus > 1 and num_gpus % 1)):
            raise ValueError(
                "write a fraction of one GPU, of 0.0001 at least, or a whole number: others can't be reserved"
            )
        return num_gpus


class DecodeConfig(ConfigSection):
    """Limits of the decoding sandbox: the most that one file may cost."""

    num_cpus: float | None = Field(None, gt=0, description="CPUs reserved by each decode task")
    timeout_s: float = Field(30.0, gt=0, description="wall clock for one image, or for one segment of a video")
    video_timeout_s: float = Field(3600.0, gt=0, description="wall clock for one whole video")
    memory_bytes: int = Field(4 << 30, ge=256 << 20, description="address space of the decoding child process")
    max_pixels: int = Field(
        100_000_000, ge=1, description="pixels of one frame; larger images are reduced, far larger ones refused"
    )
    max_file_bytes: int = Field(512 << 20, ge=1, description="encoded size of one image; videos are streamed")
    max_video_bytes: int = Field(16 << 30, ge=1, description="encoded size of one video, or of any other file")
    items_per_task: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto", description="items of one decode task, which pass from stage to stage together"
    )
    animations: Literal["first_frame", "clip"] = Field(
        "first_frame",
        description="animated GIF, PNG, WebP and AVIF: their first frame, or all of it, cut as a video is; "
        "holds for what is embedded from then on",
    )
    colour: Literal["auto", "srgb", "raw"] = Field(
        "auto",
        description="numbers of images and videos. srgb: as the file says (ICC profiles, HDR, ...); raw: all as if "
        "they were sRGB. auto: as the store was made, srgb if it is new",
    )

    @property
    def settled_colour(self) -> Colour:
        """How numbers are read; srgb, as in a store that is new, until `embedder.ingest.inputs` has resolved `auto`."""
        return "srgb" if self.colour == "auto" else self.colour


class MetadataConfig(ConfigSection):
    """What pictures and clips say of themselves, as columns beside their vectors; docs/metadata.md lists them.

    Both keys take columns and groups. What is left out is not read, and null in new rows; `embedder migrate --metadata`
    removes it from those that are there.
    """

    keep: tuple[MediumName, ...] = Field(GROUPS, description="columns and groups to fill")
    drop: tuple[MediumName, ...] = Field((), description='of these, columns and groups to leave out, as "gps"')

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns to fill."""
        return chosen_columns(self.keep, self.drop)


class WebConfig(ConfigSection):
    """Limits on images and videos that a table names by http:// and https:// addresses."""

    allow_private: bool = Field(
        False, description="connect to private, loopback and link-local addresses, too: servers of your network"
    )
    parallel: int = Field(16, ge=1, le=256, description="downloads at the same time, of each decode task")
    parallel_per_host: int = Field(4, ge=1, le=256, description="of these, at most to one host")
    timeout_s: float = Field(
        60.0, gt=0, le=86_400, description="seconds for one item: its connections, redirects, waits and further tries"
    )
    idle_timeout_s: float = Field(
        10.0, gt=0, le=600, description="seconds without a byte after which a connection is given up"
    )
    max_tries: int = Field(
        4, ge=1, le=20, description="attempts at one item where a failure may pass: 429, 5xx, a reset"
    )
    max_redirects: int = Field(5, ge=0, le=20, description="redirects that are followed, each checked as an address is")
    revalidate: bool = Field(
        False, description="ask each address at each listing whether it has changed; else its row is compared"
    )
    use_proxy: bool = Field(
        False, description="connect through HTTP_PROXY and HTTPS_PROXY; the proxy then decides what may be reached"
    )
    user_agent: str = Field(
        "embedder",
        pattern=r"^[!-~]([ -~]{0,198}[!-~])?$",
        description="name that servers are told; some want a contact",
        json_schema_extra={"rule": "up to 200 characters of ASCII, without a space at its ends"},
    )


class OnFailure(ConfigSection):
    """Notifications of a failed run; both get the run's one-line JSON record."""

    command: tuple[str, ...] = Field((), description="program and arguments; the record comes on standard input")
    webhook: str | None = Field(
        None,
        pattern=r"^https?://",
        description="address to POST the record to",
        json_schema_extra={"rule": "an address that begins with http:// or https://"},
    )
    timeout_s: float = Field(30.0, gt=0, le=600, description="seconds until the command or the webhook is given up")


class ClusterConfig(ConfigSection):
    """Part of a machine or cluster that a run may take, and what it waits for."""

    share: float = Field(1.0, gt=0, le=1, description="part of the CPUs and GPUs that are there")
    max_cpus: float | None = Field(None, gt=0, description="most CPUs of all steps together; also of a growing cluster")
    max_gpus: int | None = Field(None, ge=0, description="most GPUs of all stages together; also of a growing cluster")
    wait_s: float = Field(
        600.0, ge=0, description="seconds to wait for CPUs and GPUs that others hold, or that new nodes bring"
    )
    type_label: str = Field(
        "ray.io/accelerator-type", description="label of nodes whose value is a device type of the plan"
    )
    ship_package: bool = Field(
        True, description="send this package to nodes that lack it or have another version; their libraries must fit"
    )


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
        default_factory=lambda known: plan_of(known.get("model")),
        description="a plan file made by `embedder plan --out`; else planned at the start",
        json_schema_extra={"default": "none, or that of the first [[model]]"},
    )
    dtype: Dtype = Field(
        "auto",
        description="compute dtype. auto: that of the store, if it exists, or of the plan file; else bfloat16 on GPUs "
        "of compute capability 8.0 and up, float16 on older ones, float32 on CPUs. int8 holds for the weights alone. "
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
        default_factory=lambda known: len(known.get("stage", ())) or stages_of(known.get("model")) or NUM_STAGES,
        ge=1,
        description="shards that the model is cut into; left out: as many as there are [[stage]], or 3",
        json_schema_extra={"default": "3, or the number of [[stage]]"},
    )
    batch_size: int | Literal["auto"] = Field("auto", description="rows of a stage's batches")
    rows_per_part: int = Field(512, ge=1, description="rows of one part file; also the step of progress")
    segment_s: float = Field(5.0, gt=0, description="length of one video segment, in seconds")
    frames_per_segment: int = Field(
        4,
        ge=1,
        description="frames embedded of each segment, spread evenly; without effect with a model of clips, which takes "
        "its own number",
    )
    max_reject_fraction: float = Field(
        0.01, ge=0, le=1, description="above it nothing is published; after the first time of 100 items at least"
    )
    min_rejects: int = Field(
        10,
        ge=1,
        description="fewer rejects are published, unless max_reject_fraction is 0 or a first run embeds nothing",
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
        10.0, ge=0, description="seconds that items inside the stages may take after Ctrl-C or SIGTERM"
    )
    fast_start: bool = Field(
        True, description="patch libraries to start and run faster; EMBEDDER_FAST_START=0 switches it off everywhere"
    )
    ray_address: str | None = Field(None, description="Ray cluster to attach to; none starts Ray on this machine")
    cluster: ClusterConfig = ClusterConfig()
    publish_every_s: float | None = Field(
        None, gt=0, description="seconds between two publications of a run that goes on; left out: one, at its end"
    )
    deletion_vectors: Literal["auto"] | bool = Field(
        "auto",
        description="mark rows that leave in the tables instead of writing their part files anew; auto: where a run "
        "with true has begun it, as some readers refuse such tables",
    )
    prices: dict[str, Annotated[float, Field(ge=0)]] = Field(
        {}, description="price of an hour of one device, by its type: CPU (a core), L4, A100"
    )
    currency: str | None = Field(
        None, pattern=r"^\S{1,8}$", description="currency of all prices, as EUR; costs are told in it"
    )
    log_file: str | None = Field(None, description="file to append the log to; else one in the run's folder")
    runs_file: str | None = Field(None, description="file to append a JSON line for each run to; else STORE/runs.jsonl")
    metrics_file: str | None = Field(None, description="Prometheus text file to write when a run ends")
    metrics_address: str | None = Field(
        None,
        pattern=r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]*):\d{1,5}$",
        description="HOST:PORT that answers Prometheus while a run goes on; :9477 for this machine alone",
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
            check_models(self.model, self.model_fields_set)
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
        """Address of the store.

        Raises:
            ConfigError: the configuration names none.
        """
        if self.store is None:
            raise ConfigError("no store: give --store URI, or `store` in the configuration file")
        return self.store

    @property
    def main_model(self) -> str | None:
        """Address of the main model's folder; None where the configuration names none."""
        return self.model[0].address if isinstance(self.model, tuple) else self.model

    @property
    def further_models(self) -> tuple[FurtherModelConfig, ...]:
        """Models beside the main one."""
        return self.model[1:] if isinstance(self.model, tuple) else ()

    @property
    def model_sections(self) -> tuple[dict[str, Any], ...]:
        """Sections of the further models, as `embedder.servables.make_servable` takes them."""
        return tuple(model.settings() for model in self.further_models)

    @property
    def required_model(self) -> str:
        """Address of the main model's folder.

        Raises:
            ConfigError: the configuration names none.
        """
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
