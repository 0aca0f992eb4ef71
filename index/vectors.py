"""Vectors of one build: checked while streamed, kept on disk, and read as often as the build needs.

Shapes: `N` vectors, `E` embedding size, `Q` queries; all float32 with unit L2 norm, so an inner product is a cosine.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from index.index_errors import RetrievalError

Floats = NDArray[np.float32]
Rows = NDArray[np.int64]
Mask = NDArray[np.bool_]
Among = Mask | Rows
"""Rows that a search may find: a bool mask (rows,), or the ascending row numbers, int64 (n,)."""
Profile = Literal["text", "image"]
"""Kind of a query: texts and images need different search parameters."""

BLOCK_ROWS = 65_536  # 64 MiB at 256 dimensions
# float32 arithmetic is off by at most 1e-6, vectors rounded to bfloat16 (8 bits) by 4e-3.
NORM_TOLERANCE = 5e-3


def vectors_text(num: int) -> str:
    """Format a number of vectors for a message."""
    return "1 vector" if num == 1 else f"{num:,} vectors"


@dataclass(frozen=True)
class VectorTable:
    """Vectors of a build, (N, E), in the caller's array or in a file of raw float32 rows (`source`)."""

    num_vectors: int
    dim: int
    source: Floats | Path

    @classmethod
    def empty(cls, dim: int) -> "VectorTable":
        """Make a table without vectors."""
        return cls(0, dim, np.empty((0, dim), np.float32))

    def blocks(self) -> Iterator[Floats]:
        """Yield the rows in order, in blocks of `(<= BLOCK_ROWS, E)`; only one block of a file is mapped at a time."""
        for start in range(0, self.num_vectors, BLOCK_ROWS):
            yield self._rows()[start : start + BLOCK_ROWS]

    def take(self, rows: Rows) -> Floats:
        """Copy some rows, `(len(rows), E)`."""
        return np.asarray(self._rows()[rows], dtype=np.float32)

    def mean(self) -> Floats:
        """Compute the mean of all rows, (E,)."""
        total = np.zeros(self.dim)
        for block in self.blocks():
            total += block.sum(axis=0, dtype=np.float64)
        return (total / max(1, self.num_vectors)).astype(np.float32)

    def sample(self, num_rows: int, seed: int) -> Rows:
        """Draw sorted row numbers without repetition; deterministic for a seed."""
        num_rows = min(num_rows, self.num_vectors)
        return np.sort(np.random.default_rng(seed).choice(self.num_vectors, num_rows, replace=False)).astype(np.int64)

    def _rows(self) -> Floats:
        if isinstance(self.source, Path):
            return np.memmap(self.source, dtype=np.float32, mode="r", shape=(self.num_vectors, self.dim))
        return self.source


@dataclass(frozen=True)
class Neighbours:
    """Result of a search, best first, ties by row: `scores` (Q, k) float32 cosines, `rows` (Q, k) int64.

    Where there is none, the score is minus infinity and the row -1.
    """

    scores: Floats
    rows: Rows


def collect_vectors(vectors: Iterable[Floats] | Floats, spool: Path, dim: int | None = None) -> VectorTable:
    """Check vectors, (N, E) float32 of unit norm, and make them readable more than once.

    An array stays in memory. A stream of such blocks is written to `spool`, because training, adding and measuring each
    read it again; memory is bounded by its blocks. Raises a RetrievalError if there are none, a block has the wrong
    shape or type (`dim` None allows any width), or a row is not finite or not of unit norm.
    """
    if isinstance(vectors, np.ndarray):
        check_vectors(vectors, "vectors", dim=dim)
        table = VectorTable(len(vectors), vectors.shape[1], vectors)
    else:
        table = _spool_blocks(vectors, spool, dim)
    if table.num_vectors == 0:
        raise RetrievalError("vectors: there are none to index; embed something first")
    return table


def _spool_blocks(blocks: Iterable[Floats], spool: Path, dim: int | None) -> VectorTable:
    num_vectors = 0
    with spool.open("wb") as file:
        for block in blocks:
            check_vectors(block, "vectors", dim=dim, first_row=num_vectors)
            file.write(np.ascontiguousarray(block).data)  # not `tofile`, which swallows the error of a full disk
            num_vectors, dim = num_vectors + len(block), block.shape[1]
    return VectorTable(num_vectors, dim or 0, spool)


def count_among(among: Among) -> int:
    """Count the rows that may be found."""
    return int(np.count_nonzero(among)) if among.dtype == np.bool_ else len(among)


def is_among(among: Among, rows: NDArray[np.signedinteger[Any]]) -> Mask:
    """Whether each of some rows may be found, bool (n,)."""
    if among.dtype == np.bool_:
        passing: Mask = among[rows].astype(np.bool_, copy=False)
        return passing
    places = np.searchsorted(among, rows)
    found: Mask = places < len(among)
    found[found] = among[places[found]] == rows[found]
    return found


def distinct(numbers: NDArray[Any]) -> NDArray[Any]:
    """Sort and deduplicate numbers; `np.unique` of NumPy 2.3 and later hashes them first, which is ten times slower."""
    numbers = np.sort(numbers)
    is_first = np.ones(len(numbers), np.bool_)
    is_first[1:] = numbers[1:] != numbers[:-1]
    return numbers[is_first]


def keep_best(scores: Floats, rows: Rows, k: int) -> tuple[Floats, Rows]:
    """Keep the k best columns of each query: (Q, n) to (Q, min(k, n)), best first; equal scores keep their order."""
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)


def check_vectors(vectors: Any, where: str, *, dim: int | None = None, first_row: int = 0) -> None:
    """Raise a RetrievalError that names the row unless vectors are (N, E) float32, finite and of unit norm.

    `dim` None allows any width; `first_row` is the number of the first row, for messages about a stream.
    """
    if not isinstance(vectors, np.ndarray) or vectors.ndim != 2 or vectors.dtype != np.float32 or not vectors.shape[1]:
        found = (
            f"{vectors.dtype} of shape {vectors.shape}" if isinstance(vectors, np.ndarray) else type(vectors).__name__
        )
        raise RetrievalError(f"{where}: found {found}; give NumPy arrays of float32 with one row per vector")
    if dim is not None and vectors.shape[1] != dim:
        raise RetrievalError(
            f"{where}: found {vectors.shape[1]} dimensions, and {dim} are needed; use one model for both"
        )
    if len(vectors) == 1 and abs(math.sqrt(np.vdot(vectors, vectors)) - 1) <= NORM_TOLERANCE:
        return  # a single query, whose whole search may take as long as ten calls of NumPy
    with np.errstate(over="ignore", invalid="ignore"):
        norms = np.sqrt(np.einsum("ne,ne->n", vectors, vectors))
    is_unit = np.abs(norms - 1) <= NORM_TOLERANCE
    if is_unit.all():
        return
    is_finite = np.isfinite(norms)
    row = int(np.argmin(is_unit if is_finite.all() else is_finite))
    cure = "it must be 1; divide vectors by their L2 norm"
    if not is_finite.all():
        cure = "every value must be finite; repair or leave out that vector"
    raise RetrievalError(f"{where}: row {first_row + row:,} has L2 norm {norms[row]:.6g}; {cure}")
