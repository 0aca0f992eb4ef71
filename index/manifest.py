"""What one index version says of itself: what it was made from, how good it is, and the hashes of its files."""

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from index.errors import RetrievalError

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
INDEX_NAME = "index.faiss"
IDS_NAME = "ids.parquet"

Kind = Literal["flat", "hnsw", "ivf"]


class Manifest(BaseModel):
    """The record beside an index; written last, so a folder that has one is whole."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format_version: Literal[1] = 1
    kind: Kind
    dim: int = Field(ge=1, description="width of a vector")
    num_vectors: int = Field(ge=1)
    metric: Literal["inner_product"] = "inner_product"
    parameters: dict[str, int] = Field(description="of the build and, as `ef_search` or `nprobe`, of the search")
    embeddings_version: int = Field(description="version of the embeddings table the vectors come from")
    model_fingerprint: str = Field(description="of the model whose vectors these are")
    sha256: dict[str, str] = Field(description="file name to hex digest")
    size_bytes: int = Field(ge=1, description="all files but this one")
    recall_at_10: float = Field(ge=0, le=1, description="share of the exact top ten found, at these parameters")
    num_recall_queries: int = Field(ge=0)
    recall_query_kind: str = Field(
        description="`sampled`: vectors of the table itself; else what the caller gave: `text`"
    )
    built_at: str = Field(description="UTC, ISO 8601")
    build_s: float = Field(ge=0, description="wall clock of the whole build, recall measured")
    faiss_version: str


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the record; this makes the folder a version, so it comes last."""
    (folder / MANIFEST_NAME).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")


def read_manifest(folder: str | Path) -> Manifest:
    """Read and check the record of one version.

    Raises:
        RetrievalError: there is none, it is broken, or a newer release wrote it.
    """
    path = Path(folder) / MANIFEST_NAME
    content = _read_json(path)
    found = content.get("format_version")
    if found != FORMAT_VERSION:
        raise RetrievalError(
            f"{path}: format_version is {found!r}, this release reads {FORMAT_VERSION}; build the index again, "
            "or search with the release that built it"
        )
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        keys = ", ".join(sorted({".".join(map(str, item["loc"])) for item in error.errors()}))
        raise RetrievalError(f"{path}: these keys break their rules: {keys}; build the index again") from None
    _check_hashes_named(path, manifest)
    return manifest


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RetrievalError(f"{path}: not found, so there is no index version here; build one") from None
    except OSError as error:
        raise RetrievalError(f"{path}: {error.strerror}; make the file readable") from None
    except ValueError:
        raise RetrievalError(f"{path}: this is no valid JSON; build the index again") from None
    if not isinstance(content, dict):
        raise RetrievalError(f"{path}: this is no JSON object; build the index again")
    return content


def _check_hashes_named(path: Path, manifest: Manifest) -> None:
    expected = {INDEX_NAME, IDS_NAME}
    if set(manifest.sha256) != expected:
        raise RetrievalError(
            f"{path}: sha256 names {sorted(manifest.sha256)}, and must name {sorted(expected)}; build the index again"
        )
