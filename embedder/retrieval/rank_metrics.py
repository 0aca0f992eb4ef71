"""Retrieval metrics of texts and images, R@k and reciprocal ranks, in plain NumPy.

Legend: `Q` queries, `N` candidates, `E` embedding size.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from index.vectors import Floats

Ints = NDArray[np.int64]

BLOCK_ROWS = 1024


def retrieval_at(
    queries: Floats, query_concepts: Ints, candidates: Floats, candidate_concepts: Ints, ks: Sequence[int] = (1, 5, 10)
) -> dict[int, float]:
    """Compute R@k, by k: the share of queries with a candidate of their concept among the best k; NaN without queries.

    `queries` (Q, E) and `candidates` (N, E) are float32 with unit rows; their concepts are int64 (Q,) and (N,).
    """
    ranks = best_ranks(queries, query_concepts, candidates, candidate_concepts)
    return {k: recall_at(ranks, k) for k in ks}


def recall_at(ranks: Ints, k: int) -> float:
    """Compute R@k: the share of queries whose answer is among the best k; NaN if there are no queries.

    `ranks`, int64 (Q,), is the number of wrong answers ranked before the right one.
    """
    return float((ranks < k).mean()) if len(ranks) else float("nan")


def reciprocal_ranks(ranks: Ints) -> NDArray[np.float64]:
    """Return 1 for an answer ranked first, 1/2 for the second; float64 (Q,), whose mean is the MRR."""
    return 1 / (ranks.astype(np.float64) + 1)


def score_ranks(ranks: Ints, metric: str) -> NDArray[np.float64]:
    """Compute a metric, `R@k`, `MRR` or `nDCG@k`, of each query from its right answer's rank; float64 (Q,) in [0, 1].

    `ranks`, int64 (Q,), is the number of wrong answers ranked before the right one. Raises `ValueError` if there is no
    such metric.
    """
    name, _, depth = metric.partition("@")
    if name == "MRR":
        return reciprocal_ranks(ranks)
    if name == "R":
        return (ranks < int(depth)).astype(np.float64)
    if name == "nDCG":
        return np.where(ranks < int(depth), 1 / np.log2(ranks.astype(np.float64) + 2), 0.0)
    raise ValueError(f"metric {metric!r}: there is no such metric")


def best_ranks(queries: Floats, query_concepts: Ints, candidates: Floats, candidate_concepts: Ints) -> Ints:
    """Count, per query, the candidates of other concepts that score at least as high as its own best; int64 (Q,).

    Ties count against the model: equal vectors find nothing, and neither do those that are NaN. A query whose concept
    no candidate has gets rank N.
    `queries` (Q, E) and `candidates` (N, E) are float32 with unit rows; their concepts are int64 (Q,) and (N,).
    """
    parts = [np.empty(0, np.int64)]
    for start in range(0, len(queries), BLOCK_ROWS):
        scores = np.fmax(queries[start : start + BLOCK_ROWS] @ candidates.T, -np.inf)  # also where it is NaN
        is_own = query_concepts[start : start + BLOCK_ROWS, None] == candidate_concepts[None]
        own = np.where(is_own, scores, -np.inf).max(axis=1, initial=-np.inf)
        parts.append(((scores >= own[:, None]) & ~is_own).sum(axis=1))
    return np.concatenate(parts)
