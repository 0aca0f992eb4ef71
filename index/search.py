"""Open one version of an index, checked, and search it."""

import hashlib
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import pyarrow as pa

from index.errors import RetrievalError
from index.ids import read_ids
from index.manifest import IDS_NAME, INDEX_NAME, Manifest, read_manifest
from index.vectors import Floats, Rows, check_vectors

if TYPE_CHECKING:
    import faiss

# A file up to this size is read once, hashed and parsed in memory; a larger one is hashed and then read from the same
# open file, so that the index does not stand in memory twice.
READ_ONCE_BYTES = 256 << 20
# An approximate search for so large a share of the table reads nearly all of it, and is slower than the exact one.
EXACT_SHARE = 10


@dataclass(frozen=True)
class Hits:
    """What a search found, best first; equal scores are ordered by row.

    Attributes:
        scores: (Q, k) float32, cosines in [-1, 1].
        rows: (Q, k) int64, rows of `Index.ids`; -1 where there is none (k never exceeds the table, so none is today).
    """

    scores: Floats
    rows: Rows


class Index:
    """One version of an index in memory; `search` may be called from several threads.

    Attributes:
        manifest: what the version says of itself.
        ids: `item_id` and `segment` of each row.
    """

    def __init__(self, manifest: Manifest, ids: pa.Table, index: "faiss.Index") -> None:
        self.manifest = manifest
        self.ids = ids
        self._index = index

    def __len__(self) -> int:
        """Count the vectors."""
        return self.manifest.num_vectors

    def search(self, queries: Any, k: int = 10, *, num_threads: int | None = None) -> Hits:
        """Find the k nearest vectors of each query; where the table has fewer, all of them.

        Args:
            queries: (Q, E) of unit norm, float32 or another float type, from the model whose fingerprint the index has.
            k: how many to find, at least 1.
            num_threads: None takes all cores.

        Raises:
            RetrievalError: the queries have another width, are not finite or not of unit norm, or k is below 1.
        """
        from index import engine

        if k < 1:
            raise RetrievalError(f"k is {k}; ask for 1 result or more")
        queries_QE = self._as_queries(queries)
        k = min(k, len(self))
        with engine.threads(num_threads):
            if k * EXACT_SHARE >= len(self):
                return _ordered(*engine.search_exactly(self._index, queries_QE, k))
            scores, rows = engine.search(self._index, queries_QE, k, self.manifest.parameters)
            is_short = (rows < 0).any(axis=1)
            if is_short.any():  # k results come back whenever k exist
                scores[is_short], rows[is_short] = engine.search_exactly(self._index, queries_QE[is_short], k)
        return _ordered(scores, rows)

    def _as_queries(self, queries: Any) -> Floats:
        if isinstance(queries, np.ndarray) and np.issubdtype(queries.dtype, np.floating):
            queries = np.ascontiguousarray(queries, dtype=np.float32)
        check_vectors(queries, "queries", dim=self.manifest.dim)
        return queries  # type: ignore[no-any-return]  # check_vectors proved it


def _ordered(scores: Floats, rows: Rows) -> Hits:
    order = np.lexsort((rows, -scores), axis=1)
    return Hits(np.take_along_axis(scores, order, axis=1), np.take_along_axis(rows, order, axis=1))


def open_index(folder: str | Path, *, model_fingerprint: str | None = None) -> Index:
    """Open a version; FAISS reads no byte before the file's hash is that of the manifest, for an index file is code.

    Args:
        folder: one numbered version.
        model_fingerprint: of the model that will encode the queries; None leaves the comparison to the caller.

    Raises:
        RetrievalError: a file is missing, truncated or altered, the manifest is broken, or the model is another.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if model_fingerprint is not None and model_fingerprint != manifest.model_fingerprint:
        raise RetrievalError(
            f"{folder}: its vectors are of model {manifest.model_fingerprint}, the queries of {model_fingerprint}; "
            "vectors of two models can't be compared: search with that model, or embed and build again with this one"
        )
    with _open_checked(folder / IDS_NAME, manifest) as file:
        ids = read_ids(file.read())
    index = _read_index(folder / INDEX_NAME, manifest)
    found = (index.ntotal, index.d, ids.num_rows)
    expected = (manifest.num_vectors, manifest.dim, manifest.num_vectors)
    if found != expected:
        raise RetrievalError(
            f"{folder}: found (vectors, dimensions, ids) = {found}, its manifest says {expected}; build the index again"
        )
    return Index(manifest, ids, index)


def _read_index(path: Path, manifest: Manifest) -> "faiss.Index":
    from index import engine

    with _open_checked(path, manifest) as file:
        try:
            return engine.read(file)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise RetrievalError(
                f"{path}: FAISS {engine.VERSION} can't read what FAISS {manifest.faiss_version} wrote ({reason}); "
                "build the index again"
            ) from None


def _open_checked(path: Path, manifest: Manifest) -> BinaryIO:
    """Open a file whose content has the hash of the manifest, at its start; what is read next is what was hashed."""
    try:
        opened = path.open("rb")
    except OSError as error:
        raise RetrievalError(f"{path}: {error.strerror}; fetch the version again, or build the index again") from None
    file: BinaryIO = opened
    if os.fstat(opened.fileno()).st_size <= READ_ONCE_BYTES:
        with opened:
            file = io.BytesIO(opened.read())
    found = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # BinaryIO has readinto in fact
    if found != manifest.sha256[path.name]:
        file.close()
        raise RetrievalError(
            f"{path}: its sha256 is {found[:16]}..., the manifest says {manifest.sha256[path.name][:16]}...: the file "
            "was altered or cut short, and is not read; fetch the version again, or build the index again"
        )
    file.seek(0)
    return file
