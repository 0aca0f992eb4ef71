"""Sections of the configuration of a run: sources, captions, stages, decoding, the web, clusters."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, create_model, model_validator

from embedder.config_toml.sections import ConfigSection
from embedder.medium_columns import GROUPS, check_medium_name, chosen_columns

ComputeDtype = Literal["float32", "bfloat16", "float16", "int8"]


Dtype = Literal["auto", "float32", "bfloat16", "float16", "int8"]


Engine = Literal["auto", "ray", "local"]


Device = Literal["auto", "cpu", "cuda"]


Colour = Literal["srgb", "raw"]


MediumName = Annotated[str, AfterValidator(check_medium_name)]


SourceKind = Literal["auto", "files", "table", "webdataset"]


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
    include: tuple[str, ...] = Field((), description="only files that match one of these patterns")
    exclude: tuple[str, ...] = Field((), description="no file that matches one of these patterns")


class SourcesConfig(ConfigSection):
    """How a run finds that an item of any source has changed."""

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
    """Captions of images and videos: in files next to them, and in their metadata."""

    alone: Literal["auto"] | bool = Field(
        "auto",
        description="embed captions that belong to no image or video. auto: only those that the store has already, and "
        "all with a model only for texts",
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


def _countable_gpus(num_gpus: float) -> float:
    """Return GPUs of a process that Ray can reserve; ValueError for others."""
    if num_gpus and (num_gpus < 1e-4 or (num_gpus > 1 and num_gpus % 1)):
        raise ValueError("write a fraction of one GPU, of 0.0001 at least, or a whole number: others can't be reserved")
    return num_gpus


NumGpus = Annotated[float, AfterValidator(_countable_gpus)]


class StageConfig(ConfigSection):
    """Resources of one stage; keys that are left out are filled in when the run starts."""

    replicas: Replicas | Literal["auto"] = Field(
        "auto", description="auto: as the plan says, else what the nodes that are there have room for"
    )
    num_cpus: float | None = Field(None, ge=0, description="CPUs reserved by each replica, fractions allowed")
    num_gpus: NumGpus | None = Field(
        None, ge=0, description="GPUs reserved by each replica, a fraction of one or whole; left out: an even share"
    )
    device: Device | None = Field(
        None, description="device to compute on; left out: the run's `device`. num_gpus is reserved with any"
    )
    num_threads: int | None = Field(None, ge=1, description="torch threads of each replica")


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
    """What pictures and clips say of themselves, as columns next to their vectors; docs/metadata.md lists them.

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
    parallel_per_host: int = Field(4, ge=1, le=256, description="most of these to one host")
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
        description="name that requests give to servers; some want a contact",
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
