"""How far inverted lists reach: by how much the best vector of a list outdoes its centroid, as queries show.

Lists are read in the order of their centroids' products with the query. A wide list whose centroid is far from the
query may hold a better vector than a narrow one that is near: where clusters differ in width, five times as many lists
have to be read as if each centroid's product had the list's reach added. So this is learned from queries that the index
isn't measured with, and added as numbers that are constant in every vector and query (`NUM_CONSTANT`): a centroid holds
its list's reach there, and the codes of its vectors take it off again, so that scores are as before.

Source: Jaasaari et al. 2024, "LoRANN: Low-Rank Matrix Factorization for Approximate Nearest Neighbor Search", which
learns how the vectors of a list score; here, how the best of them does.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from index.vectors import Floats

NUM_CONSTANT = 2
"""Numbers that carry the reach. Two of them distinguish 31 values, with 16 levels each; codes come in pairs anyway."""

_NUM_LEVELS = 16
_MOST_QUERIES = 400  # twice as few or four times as many order the lists as well
_NEAR_SHARE = 8  # one of this many lists, those with the best vectors for a query, counts
_PRIOR_QUERIES = 4  # for a list that few queries are near, what lists as wide have on average counts as much as so many
_BLOCK_SCORES = 1 << 22


@dataclass(frozen=True)
class Projection:
    """Projection of vectors, `matrix` (width, E), and queries (Q, E), possibly none, that show how far lists reach."""

    matrix: Floats
    queries: Floats = field(default_factory=lambda: np.empty((0, 0), np.float32))

    @property
    def num_constant(self) -> int:
        """Numbers to append to each projected vector for its list's reach; none without queries."""
        return NUM_CONSTANT if len(self.queries) else 0

    def apply(self, vectors: Floats) -> Floats:
        """Project vectors, (n, E), to (n, width)."""
        return np.ascontiguousarray(vectors @ self.matrix.T)


def learn_reach(centroids: Floats, owners: NDArray[np.int64], vectors: Floats, queries: Floats) -> Floats:
    """Learn by how much the best vector of each list outdoes its centroid, on average for queries near to it.

    Args:
        centroids: (L, width), some of whose lists may be empty.
        owners: (n,), the list of each vector.
        vectors: (n, width).
        queries: (Q, width), at least one.

    Returns:
        (L,) float32.
    """
    num_lists = len(centroids)
    filled, starts = np.unique(owners[order := np.argsort(owners, kind="stable")], return_index=True)
    distances = np.einsum("nw,nw->n", apart := vectors - centroids[owners], apart)
    sizes = np.bincount(owners, minlength=num_lists)
    widths = np.sqrt(np.bincount(owners, distances, num_lists) / np.maximum(sizes, 1))
    queries, vectors = queries[:_MOST_QUERIES], vectors[order]
    num_near = max(1, len(filled) // _NEAR_SHARE)
    near, ahead = np.zeros((len(queries), len(filled)), bool), np.empty((len(queries), len(filled)), np.float32)
    rows = max(1, _BLOCK_SCORES // len(vectors))
    for start in range(0, len(queries), rows):
        block = queries[start : start + rows]
        best = np.maximum.reduceat(block @ vectors.T, starts, axis=1)
        near[start : start + rows] = best >= np.partition(best, -num_near, axis=1)[:, -num_near, None]
        ahead[start : start + rows] = best - block @ centroids[filled].T
    expected = _expect_by_width(np.broadcast_to(widths[filled], near.shape)[near], ahead[near], widths)
    expected[filled] = (np.sum(ahead, axis=0, where=near) + _PRIOR_QUERIES * expected[filled]) / (
        near.sum(axis=0) + _PRIOR_QUERIES
    )
    return expected.astype(np.float32)


def _expect_by_width(widths: Floats, reach: Floats, wanted: Floats) -> NDArray[np.float64]:
    """Fit a line through the reaches of lists by their widths, and return it at the `wanted` widths."""
    apart, spread = widths - widths.mean(), float(np.var(widths))
    slope = float(np.mean(apart * reach)) / spread if spread > 1e-12 else 0.0
    return reach.mean() + slope * (wanted - widths.mean())  # type: ignore[no-any-return]


def split_reach(reach: Floats) -> tuple[Floats, Floats]:
    """Round lists' reaches, (L,), to what the constant numbers distinguish, up to a constant of all lists.

    Returns:
        The constant numbers of each centroid, (L, NUM_CONSTANT), and what a vector's distance from its centroid can be
        there, (16,): its own number is 1.
    """
    step = np.float32(np.ptp(reach) / (NUM_CONSTANT * (_NUM_LEVELS - 1)))
    number = np.rint((reach - reach.min()) / step).astype(np.int64) if step > 0 else np.zeros(len(reach), np.int64)
    of_each = number[:, None] // NUM_CONSTANT + (number[:, None] % NUM_CONSTANT > np.arange(NUM_CONSTANT))
    return step * of_each.astype(np.float32), 1 - step * np.arange(_NUM_LEVELS, dtype=np.float32)
