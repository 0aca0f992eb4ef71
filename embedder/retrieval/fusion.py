"""Reciprocal rank fusion of several rankings.

Source: Cormack, Clarke and Büttcher, *Reciprocal rank fusion outperforms Condorcet and individual rank learning
methods*, SIGIR 2009; the constant 60 is theirs.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from index.vectors import Rows

RRF_K = 60

Doubles = np.ndarray[Any, np.dtype[np.float64]]


def reciprocal_rank_fusion(rankings: Sequence[Rows]) -> tuple[Rows, Doubles]:
    """Order all rows of some rankings by the sum of 1 / (60 + rank) over the rankings that have them.

    Args:
        rankings: rows, best first; each row at most once in one ranking.

    Returns:
        The rows, best first, and their sums. Equal sums are ordered as the first ranking has them, those that it lacks
        after it, by row.
    """
    rows, positions = np.unique(np.concatenate([np.empty(0, np.int64), *rankings]), return_inverse=True)
    sums = np.zeros(len(rows))
    first_ranks = np.full(len(rows), np.inf)
    start = 0
    for number, ranking in enumerate(rankings):
        own = positions[start : start + len(ranking)]
        ranks = 1.0 + np.arange(len(ranking))
        sums[own] += 1 / (RRF_K + ranks)
        if number == 0:
            first_ranks[own] = ranks
        start += len(ranking)
    order = np.lexsort((rows, first_ranks, -sums))
    return rows[order], sums[order]
