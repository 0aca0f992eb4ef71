"""Layout of a store: paths of its files, and the records in its small JSON files."""

from datetime import UTC, datetime
from shlex import quote
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from embedder.errors import StoreError
from embedder.quantities import counted
from embedder.store.files import StoreFiles
from embedder.store.schema import FORMAT_VERSION, MARKS, READABLE_FORMATS

STORE_FILE, RUNS_FOLDER = MARKS
CURRENT_FILE = "CURRENT.json"
PUBLISHED_FILE = "published.json"
PAIRS_FILE = "retrieval_pairs.parquet"
"""Sample of the published vectors, from which the next run goes on; a run's, as long as what it published is served."""
INPUT_FOLDER = "input"

Kind = Literal["embed", "refresh", "rollback", "compaction", "purge", "migration", "index"]
"""Kind of run that made a publication."""

Searched = Literal["image", "text"]
"""Vectors that searches look through: of captions only where the model has no tower for images."""
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
    searched: Searched = Field("image", description="text: the model has no tower for images")
    steps: dict[str, str] = Field({}, description="fingerprints of the user's own steps, in their order")
    step_columns: dict[str, str] = Field({}, description="types of the columns that such steps have added so far")
    # Of a further model (`embedder.store.models`); a store's main model lacks these.
    has_vectors: bool | None = None
    outputs: dict[str, str] | None = None
    servable: dict[str, Any] | None = None


class Hold(BaseModel):
    """Hold of a rollback: `embed` and `refresh` publish nothing over it until it is released."""

    model_config = ConfigDict(extra="allow", frozen=True, defer_build=True)

    since: datetime
    from_run: str = Field(description="run whose publication was left; what it holds is taken over later")
    to_run: str = Field(description="run whose rows were brought back")
    released_at: datetime | None = Field(None, description="null while the hold lasts")


class Current(Record):
    """`CURRENT.json`: the versions that belong together, which our readers open."""

    run_id: str
    embeddings: int = Field(description="version of the Delta table embeddings/")
    items: int = Field(description="version of the Delta table items/")
    index: int | None = Field(None, description="number of the index version built from that embeddings version")
    published_at: datetime
    # Model of the vectors; where a file of an older format lacks these, store.json's are used.
    model: str | None = Field(None, description="URI of the model folder")
    model_fingerprint: str | None = None
    preprocess_fingerprint: str | None = None
    segment_s: float | None = None
    frames_per_segment: int | None = None
    dtype: str | None = Field(None, description="compute dtype of the run that published")
    searched: Searched | None = Field(None, description="side whose vectors are searched")
    steps: dict[str, str] = Field({}, description="as in store.json")
    step_columns: dict[str, str] = Field({}, description="as in store.json")
    retrieval: dict[str, Any] | None = Field(None, description="R@k on the store's own pairs, as a guard measured it")
    previous: str | None = Field(None, description="run whose publication this one took the place of")
    restores: str | None = Field(None, description="run whose rows a rollback brought back")
    hold: Hold | None = Field(None, description="of the last rollback, until a refresh has taken over what it left")
    interim_of: str | None = Field(None, description="run that published part of its work and goes on with the rest")
    has_vectors: bool | None = Field(None, description="false: its rows hold other outputs alone, and it has no index")
    outputs: dict[str, str] | None = Field(None, description="Arrow types of columns that it gives beside vectors")
    servable: dict[str, Any] | None = Field(None, description="of a further model: its section of the configuration")
    models: dict[str, "Current"] = Field({}, description="further models by name; their tables are in models/NAME/")

    @property
    def is_held(self) -> bool:
        """Whether a rollback is in force."""
        return self.hold is not None and self.hold.released_at is None


class Published(Current):
    """`runs/<run_id>/published.json`: CURRENT.json at that time, and its row counts; the store's history."""

    kind: Kind
    num_items: int
    num_vectors: int = Field(description="rows of the embeddings table")
    num_rejected: int
    past_indexes: dict[int, datetime] = Field(
        {}, description="numbers of its earlier indexes, and when each was replaced"
    )
    model_counts: dict[str, dict[str, int]] = Field({}, description="row counts of each further model's tables")
    past_model_indexes: dict[str, dict[int, datetime]] = Field({}, description="`past_indexes` of further models")


class RunInfo(Record):
    """`runs/<run_id>/run.json`: parameters of a run, so that a later session can continue it."""

    run_id: str
    started_at: datetime
    model_fingerprint: str
    preprocess_fingerprint: str
    kind: Kind = "embed"
    carryover: dict[str, str] = Field({}, description="type of each carried column")
    steps: dict[str, str] = Field({}, description="fingerprints of the user's own steps")
    step_columns: dict[str, str] = Field({}, description="types of the columns that such steps add, or have added")


def describe_hold(address: str, hold: Hold) -> str:
    """Describe in one clause which hold a store is under, and how it is released."""
    return (
        f"store {address}: `embedder rollback` holds it at run {hold.to_run} since {hold.since:%Y-%m-%d %H:%M}: "
        f"embed and refresh publish nothing until `embedder rollback --release --store {quote(address)}`"
    )


RecordT = TypeVar("RecordT", bound=Record)


def run_file(run_id: str, name: str) -> str:
    """Path of a file of one run: run.json, report.json or STOP."""
    return f"{RUNS_FOLDER}/{run_id}/{name}"


def input_folder(run_id: str) -> str:
    """Path of the folder with what a run has been given to read, which goes when it ends."""
    return f"{RUNS_FOLDER}/{run_id}/{INPUT_FOLDER}"


def journal_folder(run_id: str) -> str:
    """Folder of a run's journal entries."""
    return f"{RUNS_FOLDER}/{run_id}/journal"


def utc_now() -> datetime:
    """Current time, in UTC."""
    return datetime.now(UTC)


def read_record(files: StoreFiles, path: str, kind: type[RecordT]) -> RecordT | None:
    """Read one record; None where the file does not exist.

    Args:
        files: the store.
        path: path of the file.
        kind: class of the record.

    Raises:
        StoreError: the file is damaged, or of a format that this version does not know.
    """
    try:
        data = files.read(path)
    except FileNotFoundError:
        return None
    return parse_record(files, path, data, kind)


def parse_record(files: StoreFiles, path: str, data: bytes, kind: type[RecordT]) -> RecordT:
    """Parse one record.

    Args:
        files: the store.
        path: of the file that holds it.
        data: its JSON.
        kind: class of the record.

    Raises:
        StoreError: it is damaged, or of a format that this version does not know.
    """
    try:
        record = kind.model_validate_json(data)
    except ValidationError as error:
        raise StoreError(
            f"{files.uri(path)}: not a valid {path.rsplit('/', maxsplit=1)[-1]} "
            f"({counted(error.error_count(), 'error')}); restore the file from a backup, or start a new store"
        ) from None
    if record.format_version not in READABLE_FORMATS:
        known = " and ".join(map(str, READABLE_FORMATS))
        raise StoreError(
            f"{files.uri(path)}: format version {record.format_version}, this embedder knows {known}; "
            "use the embedder that wrote the store"
        )
    return record


def write_record(files: StoreFiles, path: str, record: Record) -> None:
    """Write or replace one record, atomically.

    Args:
        files: the store.
        path: path of the file.
        record: its content.
    """
    files.write(path, record.model_dump_json(indent=2).encode())


def read_current(files: StoreFiles) -> Current | None:
    """Read what is published, None before the first publication; of a further model's view, what is of that model."""
    current = read_record(files.main, CURRENT_FILE, Current)
    return current if current is None or not files.model else current.models.get(files.model)
