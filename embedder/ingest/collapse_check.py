"""Check for collapsed vectors: a tower with broken weights gives nearly the same vector for everything.

Legend: `N` vectors, `E` embedding size.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.store.files import StoreFiles
from embedder.store.journal.hash_sample import SampledPart, journal_pieces, lowest_keys
from embedder.store.journal.journal import JournalEntry
from embedder.store.tables.arrow_tensors import unpack_vectors

Floats = np.ndarray[Any, np.dtype[np.float32]]

NUM_VECTORS = 2048
MIN_VECTORS = 32  # among fewer, similarity may be chance
# Columns that distinguish inputs: equal captions rightly have equal vectors, whatever their images.
INPUT_COLUMNS = {"image": ["content_version", "segment"], "text": ["caption"]}


def sample_vectors(files: StoreFiles, entries: Iterable[JournalEntry], tower: str) -> Floats:
    """Sample the new vectors of one tower (`image` or `text`), each of a different input.

    Returns float32 (N, E), N at most `NUM_VECTORS`.
    """
    pieces = list(journal_pieces(files, entries))
    keys = lowest_keys((_inputs(piece, tower) for piece in pieces), NUM_VECTORS)
    found: dict[str, Any] = {}
    for number in sorted({min(numbers) for numbers in keys.values()}):
        for key, vector in _vectors(pieces[number], tower, keys):
            found.setdefault(key, vector)
    return np.stack(list(found.values())) if found else np.empty((0, 0), np.float32)


def vector_variance(vectors: Floats) -> float:
    """Return the mean squared distance of vectors (N, E) from their mean; of unit vectors, 1 minus mean cosine."""
    return float(np.square(_centre(vectors)).sum(axis=1).mean())


def effective_directions(vectors: Floats) -> float:
    """Return the number of directions over which the vectors (N, E) spread: 1 on a line, up to E if all are alike.

    Source: the participation ratio of the covariance's eigenvalues, tr(C)^2 / tr(C^2).
    """
    centred = _centre(vectors)
    gram = centred.T @ centred
    squares = float(np.square(gram).sum())
    return float(np.trace(gram)) ** 2 / squares if squares else 0.0


def _centre(vectors: Floats) -> np.ndarray[Any, np.dtype[np.float64]]:
    wide = vectors.astype(np.float64)
    return np.asarray(wide - wide.mean(axis=0))


def _inputs(piece: SampledPart, tower: str) -> Iterator[str]:
    rows = piece.read(["modality", *INPUT_COLUMNS[tower]])
    if tower == "image":
        rows = rows.filter(pc.not_equal(rows["modality"], "text"))
    return (key for key in _keys(rows, tower) if key is not None)


def _keys(rows: pa.Table, tower: str) -> Iterator[str | None]:
    columns = [rows[name].to_pylist() for name in INPUT_COLUMNS[tower]]
    return (None if values[0] is None else "\n".join(map(str, values)) for values in zip(*columns, strict=True))


def _vectors(piece: SampledPart, tower: str, wanted: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Read the wanted inputs of one part file with their vectors; inputs without a vector are left out."""
    name = f"{tower}_embedding"
    rows = piece.read([*INPUT_COLUMNS[tower], name])
    rows = rows.filter(pc.is_valid(rows[name]))
    vectors = unpack_vectors(rows[name])
    for key, vector in zip(_keys(rows, tower), vectors, strict=True):
        if key is not None and key in wanted:
            yield key, vector
