"""Near-duplicates under the best of them."""

from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float32]]
Rows = np.ndarray[Any, np.dtype[np.int64]]

# Products of float32 vectors of unit norm are off by so much; equal vectors should reach a cosine of 1.
TOLERANCE = 1e-6


def fold(vectors: Floats, least_cosine: float, k: int) -> tuple[Rows, list[Rows]]:
    """Keep the first k vectors that are not near a better kept one, and tell which were near to each.

    Args:
        vectors: float32 (n, E), best first; an index that rounds gives norms of about 1.
        least_cosine: from which on two vectors are near-duplicates.
        k: how many to keep at most.

    Returns:
        The kept places, and for each the places of its duplicates. A place that is near to several goes to the best.
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
