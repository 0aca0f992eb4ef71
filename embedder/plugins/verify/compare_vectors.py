"""Comparison of two sets of vectors of the same rows. Pure."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from embedder.storage.vector_pages import VectorColumn
from index.vectors import Floats


@dataclass(frozen=True)
class Limit:
    """Limit that each vector must meet; None means no limit.

    `max_difference` is the largest absolute difference of any value, `min_cosine` the least cosine of any vector with
    its counterpart.
    """

    max_difference: float | None = None
    min_cosine: float | None = None

    def describe(self) -> str:
        """Describe the limit in words."""
        parts = []
        if self.max_difference is not None:
            parts.append(f"difference <= {self.max_difference:g}")
        if self.min_cosine is not None:
            parts.append(f"cosine >= {self.min_cosine:g}")
        return ", ".join(parts)


@dataclass(frozen=True)
class VectorComparison:
    """Comparison of one side, image or text, with one reference.

    `num_equal` counts vectors that are equal to the last bit, `max_difference` is the largest absolute difference of
    any value, and `least_cosine` that of any vector with its counterpart. `passed` is None if the items have nothing
    on this side.
    """

    side: str
    reference: str
    num_vectors: int
    num_equal: int
    max_difference: float
    least_cosine: float
    limit: Limit
    passed: bool | None

    def describe_failure(self) -> str:
        """Describe the failure in one clause."""
        return (
            f"{self.side} against {self.reference}: largest difference {self.max_difference:.3g}, least cosine "
            f"{self.least_cosine:.6f}, asked for {self.limit.describe()}"
        )


def compare(side: str, found: VectorColumn, reference: str, expected: VectorColumn, limit: Limit) -> VectorComparison:
    """Compare vectors row by row; NaN values count as infinitely far apart."""
    if not np.array_equal(found.present, expected.present):
        return VectorComparison(side, reference, 0, 0, np.inf, -1.0, limit, passed=False)
    if not len(found.values):
        return VectorComparison(side, reference, 0, 0, 0.0, 1.0, limit, passed=None)
    differences = np.nan_to_num(np.abs(found.values - expected.values), nan=np.inf)
    furthest, least = float(differences.max()), float(cosines(found.values, expected.values).min())
    is_near = limit.max_difference is None or furthest <= limit.max_difference
    is_parallel = limit.min_cosine is None or least >= limit.min_cosine
    num_equal = int((found.values == expected.values).all(axis=1).sum())
    return VectorComparison(
        side, reference, len(found.values), num_equal, furthest, least, limit, passed=is_near and is_parallel
    )


def cosines(found: Floats, expected: Floats) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the cosine of each vector with its counterpart, float64 (R,); -1 where either is NaN or zero."""
    one, other = found.astype(np.float64), expected.astype(np.float64)
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.nan_to_num((one * other).sum(axis=1) / lengths, nan=-1.0))
