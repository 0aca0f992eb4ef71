"""Projection onto the directions in which text queries vary, so that an index can leave out the others.

A caption's vector encodes the meaning of an image, an image's vector also its look. Directions in which no query varies
do not change the order of any answer; leaving them out makes vectors several times shorter at the same recall, and the
best few are scored again at full width.

Source: Tepper et al. 2023, "LeanVec: Searching vectors faster by making them fit", out-of-distribution queries; here
with one projection for both sides, the leading eigenvectors of the queries' second moments.
"""

from typing import Any

import numpy as np

from index.vectors import Floats

# Shares of the queries' second moment that a width may keep: the lowest loses a little, which re-ranking recovers.
_KEPT_SHARES = (0.98, 0.9995)
_WIDTH_STEP = 16  # AVX-512 compares 16 floats at a time
# Wider than this share of E a projection saves too little to be worth its error.
_MAX_WIDTH_SHARE = 0.6
_QUERIES_PER_DIRECTION = 4  # the least to estimate a direction


class QueryDirections:
    """Directions that queries vary in, the strongest first."""

    def __init__(self, queries: Floats) -> None:
        """Find the directions.

        Args:
            queries: (Q, E) of unit norm, like those that will be asked; not those that recall is measured on.
        """
        self._num_queries = len(queries)
        moments = queries.T.astype(np.float64) @ queries.astype(np.float64)
        strengths, directions = np.linalg.eigh(moments)
        self._strengths, self._directions = strengths[::-1], directions[:, ::-1]

    def matrix(self, width: int) -> Floats:
        """Compute the projection onto the strongest directions, (width, E), with orthonormal rows."""
        return np.ascontiguousarray(self._directions[:, :width].T, dtype=np.float32)

    def useful_widths(self) -> tuple[int, ...]:
        """Find the widths worth trying, ascending; none where there are too few queries, or all directions matter."""
        kept: Any = np.cumsum(self._strengths) / self._strengths.sum()
        dim = len(kept)
        widths = sorted(
            {-(-(int(np.searchsorted(kept, share)) + 1) // _WIDTH_STEP) * _WIDTH_STEP for share in _KEPT_SHARES}
        )
        return tuple(
            width
            for width in widths
            if width <= _MAX_WIDTH_SHARE * dim and width * _QUERIES_PER_DIRECTION <= self._num_queries
        )
