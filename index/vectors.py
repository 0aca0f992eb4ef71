"""The vectors of one build: checked as they stream in, kept on disk, and read as often as the build needs them.

Shapes: `N` vectors, `E` embedding size, `Q` queries; all float32 with unit L2 norm, so an inner product is a cosine.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from index.errors import RetrievalError

Floats = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

BLOCK_ROWS = 65_536  # 64 MiB at 256 dimensions
# float32 arithmetic is off by 1e-6 at most; vectors rounded to bfloat16 (8 bits) by 4e-3.
NORM_TOLERANCE = 5e-3


@dataclass(frozen=True)
class VectorTable:
    """All vectors of a build, in the caller's array or in a file of raw float32 rows."""

    num_vectors: int
    dim: int
    source: Floats | Path

    @classmethod
    def empty(cls, dim: int) -> "VectorTable":
        """Make a table without vectors."""
        return cls(0, dim, np.empty((0, dim), np.float32))

    def blocks(self) -> Iterator[Floats]:
        """Give the rows in order, `(<= BLOCK_ROWS, E)` at a time; only one block of a file is mapped at once."""
        for start in range(0, self.num_vectors, BLOCK_ROWS):
            yield self._rows()[start : start + BLOCK_ROWS]

    def take(self, rows: Rows) -> Floats:
        """Give a copy of these rows, `(len(rows), E)`."""
        return np.asarray(self._rows()[rows], dtype=np.float32)

    def mean(self) -> Floats:
        """Give the mean of all rows, (E,)."""
        total = np.zeros(self.dim)
        for block in self.blocks():
            total += block.sum(axis=0, dtype=np.float64)
        return (total / max(1, self.num_vectors)).astype(np.float32)

    def sample(self, num_rows: int, seed: int) -> Rows:
        """Draw row numbers without repetition, sorted; the same for the same seed."""
        num_rows = min(num_rows, self.num_vectors)
        return np.sort(np.random.default_rng(seed).choice(self.num_vectors, num_rows, replace=False)).astype(np.int64)

    def _rows(self) -> Floats:
        if isinstance(self.source, Path):
            return np.memmap(self.source, dtype=np.float32, mode="r", shape=(self.num_vectors, self.dim))
        return self.source


def collect_vectors(vectors: Iterable[Floats] | Floats, spool: Path, dim: int | None = None) -> VectorTable:
    """Check all vectors, and make them readable more than once.

    An array stays where it is. A stream is written to `spool` as it comes, so memory is bounded by its blocks:
    training, adding and measuring each read it again. Where `dim` is given, it is the width that they must have.

    Raises:
        RetrievalError: there are none, a block has the wrong shape or type, or a row is not finite or not of unit norm.
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
            file.write(np.ascontiguousarray(block).data)  # not `tofile`, which loses the error of a full disk
            num_vectors, dim = num_vectors + len(block), block.shape[1]
    return VectorTable(num_vectors, dim or 0, spool)


def check_vectors(vectors: Any, where: str, *, dim: int | None = None, first_row: int = 0) -> None:
    """Refuse what would make a wrong index or a wrong answer.

    Args:
        vectors: what the caller gave; must be (N, E) float32 with finite rows of unit norm.
        where: what to call it in a message.
        dim: E, where it is known.
        first_row: number of the first row, for messages about a stream.

    Raises:
        RetrievalError: one of the rules is broken; the row is named.
    """
    if not isinstance(vectors, np.ndarray) or vectors.ndim != 2 or vectors.dtype != np.float32 or not vectors.shape[1]:
        found = (
            f"{vectors.dtype} of shape {vectors.shape}" if isinstance(vectors, np.ndarray) else type(vectors).__name__
        )
        raise RetrievalError(f"{where}: found {found}; give NumPy arrays of float32 with one row a vector")
    if dim is not None and vectors.shape[1] != dim:
        raise RetrievalError(
            f"{where}: found {vectors.shape[1]} dimensions, and {dim} are needed; use one model for both"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        norms = np.sqrt(np.einsum("ne,ne->n", vectors, vectors))
    _refuse_rows(
        ~np.isfinite(norms), norms, where, first_row, "every value must be finite; mend or leave out that vector"
    )
    _refuse_rows(
        np.abs(norms - 1) > NORM_TOLERANCE, norms, where, first_row, "it must be 1; divide vectors by their L2 norm"
    )


def _refuse_rows(is_bad: npt.NDArray[np.bool_], norms: Floats, where: str, first_row: int, cure: str) -> None:
    if is_bad.any():
        row = int(np.argmax(is_bad))
        raise RetrievalError(f"{where}: row {first_row + row:,} has L2 norm {norms[row]:.6g}; {cure}")
