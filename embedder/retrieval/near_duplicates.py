"""Fold near-duplicates under the best of them."""

import numpy as np

from index.vectors import Floats, Rows

# Rounding error of products of float32 vectors of unit norm; equal vectors should reach a cosine of 1.
TOLERANCE = 1e-6


def fold(vectors: Floats, least_cosine: float, k: int) -> tuple[Rows, list[Rows]]:
    """Keep the first k vectors that are not near a better kept one, and list the duplicates of each.

    Args:
        vectors: float32 (n, E), best first; an index that rounds gives norms of about 1.
        least_cosine: from which on two vectors are near-duplicates.
        k: most vectors to keep.

    Returns:
        Positions kept, and for each the positions of its duplicates. A vector near several belongs to the best.
    """
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    directions = vectors / np.maximum(norms, np.finfo(np.float32).tiny)
    left = np.arange(len(vectors))
    kept: list[int] = []
    duplicates: list[Rows] = []
    while len(left) and len(kept) < k:
        is_near = directions[left] @ directions[left[0]] >= least_cosine - TOLERANCE
        is_near[0] = True
        kept.append(left[0])
        duplicates.append(left[is_near][1:])
        left = left[~is_near]
    return np.array(kept, np.int64), duplicates
