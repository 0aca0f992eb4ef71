"""Layout of a store: paths of its files, and the records in its small JSON files."""

import re
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from shlex import quote
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from embedder.errors import StoreError
from embedder.quantities import plural
from embedder.storage.printable import printable
from embedder.store.backends import WriteConflictError
from embedder.store.files import StoreFiles
from embedder.store.schema import FORMAT_VERSION, MARKS, READABLE_FORMATS

STORE_FILE, RUNS_FOLDER = MARKS
CURRENT_FILE = "CURRENT.json"
PUBLISHED_FILE = "published.json"
PAIRS_FILE = "retrieval_pairs.parquet"
"""Sample of published vectors that the next run builds on; a run's file lives as long as its publication is served."""
INPUT_FOLDER = "input"

MAIN = "main"
"""Name of the main model in messages and commands; in code it is the empty name."""
MODEL_NAME = r"^[a-z][a-z0-9_]{0,31}$"
MODEL_NAME_RULE = "lower-case letters, digits and _, at most 32 characters, the first one a letter, and not `main`"

_RUN_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")
_LAST_NUMBER = 999_999_999_999  # a commit a second for 30,000 years
_MAX_SHOWN = 100  # characters of a value in a message


def _check_run_id(run_id: str) -> str:
    """Refuse a run id that isn't a plain folder name, such as a path that leads out of the store."""
    if _RUN_ID.fullmatch(run_id) is None:
        raise ValueError("a run id has letters, digits, _, - and ., at most 128, the first one no point")
    return run_id


def is_model_name(name: str) -> bool:
    """Return whether the name is allowed for a model other than the main one."""
    return name != MAIN and re.fullmatch(MODEL_NAME.strip("^$"), name) is not None


def _check_model_name(name: str) -> str:
    if not is_model_name(name):
        raise ValueError(f"a model's name has {MODEL_NAME_RULE}")
    return name


RunId = Annotated[str, AfterValidator(_check_run_id)]
ModelName = Annotated[str, AfterValidator(_check_model_name)]
TableVersion = Annotated[int, Field(ge=-1, le=_LAST_NUMBER)]
"""Version of a Delta table; -1 before its first commit."""
IndexNumber = Annotated[int, Field(ge=0, le=_LAST_NUMBER)]
Count = Annotated[int, Field(ge=0)]

Kind = Literal["embed", "refresh", "rollback", "compaction", "purge", "migration", "index"]
"""Kind of run that made a publication."""

Searched = Literal["image", "text"]
"""Vectors that are searched: those of captions only if the model has no image tower."""
Colour = Literal["srgb", "raw"]
"""How pixel values are read: as the file says, or all as sRGB, as was done before there was a choice."""
RAW: Colour = "raw"
SEARCHED_NAMES: dict[Searched, str] = {"image": "image or video", "text": "caption"}


class Record(BaseModel):
    """Small JSON file of the store; newer writers may add keys, which older readers keep and ignore."""

    model_config = ConfigDict(extra="allow", frozen=True, defer_build=True)

    format_version: int = FORMAT_VERSION


class StoreInfo(Record):
    """`store.json`: the model of the vectors, so that search finds it."""

    model: str = Field(description="URI of the model folder")
    model_fingerprint: str
    preprocess_fingerprint: str
    segment_s: float
    frames_per_segment: int
    dtype: str = Field(description="compute dtype of the first run; recorded, not hashed")
    colour: Colour = Field(RAW, description="how numbers of pixels are read; raw where a store says nothing")
    searched: Searched = Field("image", description="text: the model has no tower for images")
    steps: dict[str, str] = Field({}, description="fingerprints of the user's own steps, in their order")
    step_columns: dict[str, str] = Field({}, description="types of the columns that such steps have added so far")
    medium_columns: tuple[str, ...] = Field((), description="columns of the medium that the table has")
    libraries: dict[str, str] = Field(
        {}, description="versions that decide the last bits of vectors; recorded, not hashed"
    )
    half_of: str | None = Field(
        None, description="fingerprint of the model whose vectors are recorded in half precision, as a gate allowed"
    )
    # For models other than the main one only (`embedder.store.tables.models`).
    has_vectors: bool | None = None
    outputs: dict[str, str] | None = None
    servable: dict[str, Any] | None = None


class Hold(BaseModel):
    """Hold of a rollback: until it is released, `embed` and `refresh` publish nothing."""

    model_config = ConfigDict(extra="allow", frozen=True, defer_build=True)

    since: datetime
    from_run: RunId = Field(description="run whose publication was left; what it holds is taken over later")
    to_run: RunId = Field(description="run whose rows were brought back")
    released_at: datetime | None = Field(None, description="null while the hold lasts")


class Current(Record):
    """`CURRENT.json`: the versions that belong together, which our readers open."""

    run_id: RunId
    embeddings: TableVersion = Field(description="version of the Delta table embeddings/")
    items: TableVersion = Field(description="version of the Delta table items/")
    index: IndexNumber | None = Field(
        None, description="number of the index version built from that embeddings version"
    )
    published_at: datetime
    # Model of the vectors; if a file of an older format lacks these fields, store.json's are used.
    model: str | None = Field(None, description="URI of the model folder")
    model_fingerprint: str | None = None
    preprocess_fingerprint: str | None = None
    segment_s: float | None = None
    frames_per_segment: int | None = None
    dtype: str | None = Field(None, description="compute dtype of the run that published")
    colour: Colour = Field(RAW, description="as in store.json")
    searched: Searched | None = Field(None, description="side whose vectors are searched")
    steps: dict[str, str] = Field({}, description="as in store.json")
    step_columns: dict[str, str] = Field({}, description="as in store.json")
    medium_columns: tuple[str, ...] = Field((), description="as in store.json")
    libraries: dict[str, str] = Field({}, description="as in store.json, of the run that published")
    retrieval: dict[str, Any] | None = Field(None, description="R@k on the store's own pairs, as a guard measured it")
    previous: RunId | None = Field(None, description="run whose publication this one took the place of")
    restores: RunId | None = Field(None, description="run whose rows a rollback brought back")
    hold: Hold | None = Field(None, description="of the last rollback, until a refresh has taken over what it left")
    interim_of: RunId | None = Field(None, description="run that published part of its work and continues it")
    has_vectors: bool | None = Field(None, description="false: its rows hold only other outputs, and it has no index")
    outputs: dict[str, str] | None = Field(None, description="Arrow types of columns that it gives besides vectors")
    servable: dict[str, Any] | None = Field(None, description="of a further model: its section of the configuration")
    models: dict[ModelName, "Current"] = Field(
        {}, description="further models by name; their tables are in models/NAME/"
    )
    deleting: tuple[RunId, ...] = Field(
        (), description="lists, in deletions/, of files to which nothing refers any more"
    )
    last_index: dict[str, int] = Field(
        {}, description="highest number of a deleted index, by model; none is used again"
    )
    fence: str | None = Field(None, description="mark of a writer that took the store over from a silent one")

    @property
    def is_held(self) -> bool:
        """Return whether a rollback is in force."""
        return self.hold is not None and self.hold.released_at is None


class Published(Current):
    """`runs/<run_id>/published.json`: CURRENT.json as it was, and its row counts; these form the store's history."""

    kind: Kind
    num_items: Count
    num_vectors: Count = Field(description="rows of the embeddings table")
    num_rejected: Count
    num_pictures: Count | None = Field(
        None, description="rows of it with the vector of an image or of a video's segment; null: of an earlier release"
    )
    past_indexes: dict[IndexNumber, datetime] = Field(
        {}, description="numbers of its earlier indexes, and when each was replaced"
    )
    model_counts: dict[ModelName, dict[str, Count]] = Field({}, description="row counts of each further model's tables")
    past_model_indexes: dict[ModelName, dict[IndexNumber, datetime]] = Field(
        {}, description="`past_indexes` of further models"
    )


class RunInfo(Record):
    """`runs/<run_id>/run.json`: parameters of a run, so that a later session can continue it."""

    run_id: RunId
    started_at: datetime
    model_fingerprint: str
    preprocess_fingerprint: str
    kind: Kind = "embed"
    session: str = Field("", description="session that works on it, or did last")
    is_withdrawn: bool = Field(False, description="whether the command that began it was refused; nothing resumes it")
    carryover: dict[str, str] = Field({}, description="type of each carried column")
    steps: dict[str, str] = Field({}, description="fingerprints of the user's own steps")
    step_columns: dict[str, str] = Field({}, description="types of the columns that such steps add, or have added")
    medium_columns: tuple[str, ...] = Field((), description="as in store.json")


def describe_hold(address: str, hold: Hold) -> str:
    """Describe in one clause a store's hold, and how to release it."""
    return (
        f"store {address}: `embedder rollback` holds it at run {hold.to_run} since {hold.since:%Y-%m-%d %H:%M}: "
        f"embed and refresh publish nothing until `embedder rollback --release --store {quote(address)}`"
    )


RecordT = TypeVar("RecordT", bound=Record)


def run_file(run_id: str, name: str) -> str:
    """Return the path of a file of one run: run.json, report.json or STOP."""
    return f"{RUNS_FOLDER}/{run_id}/{name}"


def input_folder(run_id: str) -> str:
    """Return the path of the folder with a run's inputs, which is deleted when the run ends."""
    return f"{RUNS_FOLDER}/{run_id}/{INPUT_FOLDER}"


def journal_folder(run_id: str) -> str:
    """Return the folder of a run's journal entries."""
    return f"{RUNS_FOLDER}/{run_id}/journal"


def utc_now() -> datetime:
    """Return the current time, in UTC."""
    return datetime.now(UTC)


def read_record(files: StoreFiles, path: str, kind: type[RecordT]) -> RecordT | None:
    """Read one record; None if there is no file, StoreError if it is damaged or of an unknown format."""
    try:
        data = files.read(path)
    except FileNotFoundError:
        return None
    return parse_record(files, path, data, kind)


def parse_record(files: StoreFiles, path: str, data: bytes, kind: type[RecordT]) -> RecordT:
    """Parse one record, or raise StoreError if it is damaged or of a format unknown to this version."""
    try:
        record = kind.model_validate_json(data)
    except ValidationError as error:
        raise StoreError(
            f"{files.uri(path)}: not a valid {path.rsplit('/', maxsplit=1)[-1]}: {_describe_mistake(error)}; restore "
            "the file from a backup, or start a new store"
        ) from None
    if record.format_version not in READABLE_FORMATS:
        known = " and ".join(map(str, READABLE_FORMATS))
        raise StoreError(
            f"{files.uri(path)}: format version {record.format_version}, this embedder knows {known}; "
            "use the embedder that wrote the store"
        )
    return record


def _describe_mistake(error: ValidationError) -> str:
    """Describe a record's first mistake in one clause (key, value found, rule), and how many there are."""
    first, *others = error.errors(include_url=False)
    key, rule = ".".join(map(str, first["loc"])).removesuffix(".[key]"), first["msg"].removeprefix("Value error, ")
    value = "" if first["type"] == "missing" else f" = {printable(repr(first['input']), _MAX_SHOWN)}"
    text = printable(f"{key}{value}: {rule}" if key else rule, 4 * _MAX_SHOWN)
    return f"{text} (and {plural(len(others), 'more mistake')})" if others else text


def swap_record(
    files: StoreFiles, path: str, kind: type[RecordT], change: Callable[[RecordT | None], RecordT | None]
) -> RecordT | None:
    """Read, change and write one record, if it is unchanged since it was read; return the record that is then there.

    `change` maps the record (None: missing) to the new one, or to None to leave it as it is. The caller holds the write
    lock if others may write the record. Raises LeaseLostError if another run has taken over the store, and StoreError
    if the record is damaged.
    """
    last: list[RecordT | None] = []

    def rewrite(data: bytes | None) -> bytes | None:
        before = None if data is None else parse_record(files, path, data, kind)
        after = change(before)
        last[:] = [before if after is None else after]
        return None if after is None or after == before else record_bytes(after)

    swap_bytes(files, path, rewrite)
    return last[0]


def swap_bytes(files: StoreFiles, path: str, change: Callable[[bytes | None], bytes | None]) -> None:
    """Read, change and write a file, if it is unchanged since it was read.

    `change` maps its content (None: missing) to the new one, or to None to leave it as it is. The caller holds the
    write lock if others may write the file. Raises LeaseLostError if another run has taken over the store.
    """
    while True:
        try:
            before, tag = files.read_tagged(path)
        except FileNotFoundError:
            before, tag = None, None
        after = change(before)
        if after is None or after == before:
            return
        files.confirm_lease()
        with suppress(WriteConflictError):  # an overtaken writer is refused when it confirms again
            files.replace(path, after, tag)
            return


def write_record(files: StoreFiles, path: str, record: Record) -> None:
    """Write or replace one record, on condition that nobody else writes it meanwhile."""
    swap_bytes(files, path, lambda before: record_bytes(record))


def create_record(files: StoreFiles, path: str, record: Record) -> bool:
    """Write one record unless it exists; return whether this call wrote it."""
    return files.create(path, record_bytes(record))


def record_bytes(record: Record) -> bytes:
    """Return the JSON of a record."""
    return record.model_dump_json(indent=2).encode()


def read_current(files: StoreFiles) -> Current | None:
    """Return what is published (in a model's view, of that model); None before the first publication."""
    current = read_record(files.main, CURRENT_FILE, Current)
    return current if current is None or not files.model else current.models.get(files.model)
