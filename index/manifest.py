"""Manifest of an index version: its origin, its measured quality, and the hashes of its files."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from index.designs import Kind
from index.index_errors import RetrievalError

FORMAT_VERSION = 2
PARTS_FORMAT_VERSION = 3  # of an index in parts, which earlier releases do not read
MANIFEST_NAME = "manifest.json"
INDEX_NAME = "index.faiss"
IDS_NAME = "ids.parquet"
QUERIES_NAME = "queries.npz"
LIVE_NAME = "live.npy"
TEMPLATE_NAME = "template.faiss"
REQUIRED_NAMES = frozenset({INDEX_NAME, IDS_NAME})
OPTIONAL_NAMES = frozenset({QUERIES_NAME, LIVE_NAME})


class Point(BaseModel):
    """Search parameters with their recall and latency, measured on the queries of the version."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    parameters: dict[str, int]
    recall_at_10: float = Field(ge=0, le=1)
    latency_ms: float = Field(ge=0, description="of one query on one thread, the median")


class DesignTrial(BaseModel):
    """Measurement of one design, at the cheapest search parameters that reach the target recall."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    design: str
    num_vectors: int = Field(description="size of the sample of the table")
    parameters: dict[str, int]
    recall_at_10: float = Field(
        ge=0, le=1, description="on the sample, less what rounding takes more of the whole table's"
    )
    latency_ms: float = Field(ge=0, description="of one query on one thread, on the sample")
    expected_latency_ms: float = Field(ge=0, description="the same on the whole table, extrapolated")
    expected_bytes: int = Field(ge=0, description="of the whole table's index, in memory")
    expected_disk_bytes: int | None = Field(default=None, ge=0, description="of its vectors that stay on the disk")
    build_s: float = Field(ge=0, description="on the sample")
    is_efficient: bool = Field(
        description="no other trial is better in one of recall, latency, bytes and as good in all"
    )
    verdict: str = Field(description="chosen, or why not")


class PartRecord(BaseModel):
    """Part of an index that is larger than memory, and the names of its files."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    number: int = Field(ge=0, description="never used twice, so a file's content never changes under its name")
    num_rows: int = Field(ge=1)

    @property
    def lists(self) -> str:
        """Inverted lists, a file of FAISS."""
        return f"lists-{self.number:06d}.faiss"

    @property
    def codes(self) -> str:
        """Codes of the vectors, list by list."""
        return f"vectors-{self.number:06d}.codes"

    @property
    def places(self) -> str:
        """Position of each row among the codes, uint32."""
        return f"places-{self.number:06d}.u32"

    @property
    def ids(self) -> str:
        """Ids of the rows, a file of Arrow, uncompressed."""
        return f"ids-{self.number:06d}.arrow"

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return (self.lists, self.codes, self.places, self.ids)


class Manifest(BaseModel):
    """Manifest of a version; written last, so a folder that has one is complete."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    format_version: Literal[2, 3] = 2
    kind: Kind
    design: str = Field(description="as `index.designs` writes it")
    dim: int = Field(ge=1, description="width of a vector")
    num_vectors: int = Field(ge=1, description="vectors that a search may find")
    num_rows: int = Field(ge=1, description="rows of the FAISS index: the vectors, and those masked since the build")
    num_built: int = Field(ge=1, description="vectors when it was last built whole")
    metric: Literal["inner_product"] = "inner_product"
    parameters: dict[str, int] = Field(description="of a search by text: `ef_search` or `nprobe`, `k_factor`")
    image_parameters: dict[str, int] | None = Field(
        default=None, description="of a search by image; null where only exact search reaches the recall"
    )
    embeddings_version: int = Field(description="version of the embeddings table the vectors come from")
    model_fingerprint: str = Field(description="of the model whose vectors these are")
    parts: tuple[PartRecord, ...] | None = Field(
        default=None, description="of an index that is larger than memory, in the order of their rows; else null"
    )
    sha256: dict[str, str] = Field(description="file name to hex digest")
    size_bytes: int = Field(ge=1, description="all files but this one")
    memory_bytes: int = Field(ge=1, description="of the FAISS file, all of it read; of parts, all but their vectors")
    recall_at_10: float = Field(ge=0, le=1, description="share of the exact top ten found, at these parameters")
    built_recall_at_10: float = Field(ge=0, le=1, description="the same when it was last built whole")
    image_recall_at_10: float = Field(ge=0, le=1, description="the same for images, at their parameters")
    num_recall_queries: int = Field(ge=0)
    recall_query_kind: str = Field(
        description="`sampled`: vectors of the table itself; `text-like`: made from them; else the caller's: `text`"
    )
    target_recall: float = Field(gt=0, le=1, description="recall that was asked for")
    missed: str | None = Field(default=None, description="which constraints no design kept, and this one by how much")
    latency_ms: float = Field(ge=0, description="of one query on one thread, at these parameters")
    exact_row_us: float = Field(ge=0, description="microseconds to read and score one row of a filtered exact search")
    scan_row_us: float = Field(ge=0, description="the same where texts ask, and projections are held by row")
    drift: float = Field(
        default=0,
        ge=0,
        description="distance between the means of what was added since the build and of what was built",
    )
    curve: tuple[Point, ...] = Field(default=(), description="search parameters that were measured, texts as queries")
    trials: tuple[DesignTrial, ...] = Field(default=(), description="designs that were measured before the choice")
    built_at: str = Field(description="UTC, ISO 8601")
    build_s: float = Field(ge=0, description="wall clock of the whole build or update, choice and measures included")
    steps_s: dict[str, float] = Field(default_factory=dict, description="wall clock of its steps, `tune` among them")
    faiss_version: str

    @property
    def num_masked(self) -> int:
        """Number of rows that no search may find any more."""
        return self.num_rows - self.num_vectors


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest last: this makes the folder a version."""
    (folder / MANIFEST_NAME).write_text(manifest.model_dump_json(indent=2, exclude_none=True) + "\n", encoding="utf-8")


def read_manifest(folder: str | Path) -> Manifest:
    """Read a version's manifest; raises a RetrievalError if it is missing, broken, or of a newer release."""
    path = Path(folder) / MANIFEST_NAME
    try:
        return parse_manifest(path.read_bytes(), str(path))
    except FileNotFoundError:
        raise RetrievalError(f"{path}: not found, so there is no index version here; build one") from None
    except OSError as error:
        raise RetrievalError(f"{path}: {error.strerror}; make the file readable") from None


def parse_manifest(data: bytes, where: str) -> Manifest:
    """Parse a version's manifest from `where`; raises a RetrievalError if it is broken, or of a newer release."""
    content = _parse_json(data, where)
    if content.get("format_version") == 1:
        content = _from_format_1(content)
    found = content.get("format_version")
    if found != (PARTS_FORMAT_VERSION if "parts" in content else FORMAT_VERSION):
        raise RetrievalError(
            f"{where}: format_version is {found!r}, this release reads {FORMAT_VERSION}, and {PARTS_FORMAT_VERSION} of "
            "an index in parts; build the index again, or search with the release that built it"
        )
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        keys = ", ".join(sorted({".".join(map(str, item["loc"])) for item in error.errors()}))
        raise RetrievalError(f"{where}: these keys break their rules: {keys}; build the index again") from None
    _check_hashes_named(where, manifest)
    return manifest


def _from_format_1(content: dict[str, Any]) -> dict[str, Any]:
    """Convert a manifest of the first release: one of three plain designs, never updated."""
    given, kind = content.get("parameters"), content.get("kind")
    build = given if isinstance(given, dict) else {}
    designs = {"flat": "Flat", "hnsw": "HNSW32,Flat", "ivf": f"IVF{build.get('num_lists', 1)},Flat"}
    num_vectors, recall = content.get("num_vectors"), content.get("recall_at_10")
    added = {
        "design": designs.get(kind) if isinstance(kind, str) else None,
        "num_rows": num_vectors,
        "num_built": num_vectors,
        "memory_bytes": content.get("size_bytes"),
        "built_recall_at_10": recall,
        "image_recall_at_10": 0.0,
        "target_recall": 0.95,
        "latency_ms": 0.0,
        "exact_row_us": 0.0,
        "scan_row_us": 0.0,
    }
    search = {name: value for name, value in build.items() if name in ("ef_search", "nprobe")}
    return content | added | {"format_version": FORMAT_VERSION, "parameters": search}


def _parse_json(data: bytes, where: str) -> dict[str, Any]:
    try:
        content = json.loads(data.decode())
    except (ValueError, RecursionError):  # the latter of a list of a list of ...
        raise RetrievalError(f"{where}: this is no valid JSON; build the index again") from None
    if not isinstance(content, dict):
        raise RetrievalError(f"{where}: this is no JSON object; build the index again")
    return content


def _check_hashes_named(where: str, manifest: Manifest) -> None:
    named, required = set(manifest.sha256), REQUIRED_NAMES
    if manifest.parts is not None:
        required = frozenset({TEMPLATE_NAME, *(name for part in manifest.parts for name in part.names)})
    if not required <= named <= required | OPTIONAL_NAMES:
        raise RetrievalError(
            f"{where}: sha256 names {_join_names(named)}, and must name {_join_names(required)}, of others only "
            f"{_join_names(OPTIONAL_NAMES)}; build the index again"
        )


def _join_names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
