"""How well texts find pictures: R@k, in plain NumPy.

Legend: `Q` queries, `N` candidates, `E` embedding size.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float32]]
Ints = np.ndarray[Any, np.dtype[np.int64]]

BLOCK_ROWS = 1024


def retrieval_at(
    queries: Floats, query_concepts: Ints, candidates: Floats, candidate_concepts: Ints, ks: Sequence[int] = (1, 5, 10)
) -> dict[int, float]:
    """Share of queries with a candidate of their concept among the best k.

    Args:
        queries: float32 (Q, E), unit rows.
        query_concepts: int64 (Q,).
        candidates: float32 (N, E), unit rows.
        candidate_concepts: int64 (N,).
        ks: ranks to report.

    Returns:
        R@k by k; not a number where there are no queries.
    """
    ranks = best_ranks(queries, query_concepts, candidates, candidate_concepts)
    return {k: recall_at(ranks, k) for k in ks}


def recall_at(ranks: Ints, k: int) -> float:
    """R@k: share of the queries whose answer is among the best k; not a number where there are no queries.

    Args:
        ranks: int64 (Q,), how many wrong answers stand before the right one.
        k: at least 1.
    """
    return float((ranks < k).mean()) if len(ranks) else float("nan")


def reciprocal_ranks(ranks: Ints) -> np.ndarray[Any, np.dtype[np.float64]]:
    """1 for an answer that stands first, 1/2 for one that stands second; their mean is the MRR. float64 (Q,)."""
    return 1 / (ranks.astype(np.float64) + 1)


def best_ranks(queries: Floats, query_concepts: Ints, candidates: Floats, candidate_concepts: Ints) -> Ints:
    """For each query, how many candidates of other concepts score as high as its own best one or higher; int64 (Q,).

    Ties count against the model: vectors that are all alike find nothing. A query whose concept no candidate has
    gets N.
    """
    parts = [np.empty(0, np.int64)]
    for start in range(0, len(queries), BLOCK_ROWS):
        scores = queries[start : start + BLOCK_ROWS] @ candidates.T
        is_own = query_concepts[start : start + BLOCK_ROWS, None] == candidate_concepts[None]
        own = np.where(is_own, scores, -np.inf).max(axis=1, initial=-np.inf)
        parts.append(((scores >= own[:, None]) & ~is_own).sum(axis=1))
    return np.concatenate(parts)
