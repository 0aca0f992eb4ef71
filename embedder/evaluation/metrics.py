"""Metrics with confidence intervals from ranks, of all queries and of groups."""

from collections.abc import Sequence

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from embedder.evaluation.exact import Ints
from embedder.evaluation.intervals import ConfidenceInterval, mean, share
from shards.training.metrics import reciprocal_ranks

SMALL_GROUP = 30  # queries; a share of fewer is known to some +-0.15 at best


class GroupFigures(BaseModel):
    """Figures of a group of queries, over all images."""

    model_config = ConfigDict(frozen=True)

    name: str
    num_queries: int
    is_small: bool = Field(description=f"fewer than {SMALL_GROUP} queries: mostly luck")
    r_at: dict[int, ConfidenceInterval] = Field(description="R@k of the model: exact search")
    mrr: ConfidenceInterval
    r_at_through_index: dict[int, ConfidenceInterval] | None = Field(description="none where the store has no index")


def recalls(ranks: Ints, ks: Sequence[int]) -> dict[int, ConfidenceInterval]:
    """R@k by k.

    Args:
        ranks: int64 (Q,), number of wrong items before the right one.
        ks: ranks to report.
    """
    return {k: share(ranks < k) for k in ks}


def mean_reciprocal_rank(ranks: Ints) -> ConfidenceInterval:
    """MRR over whole rankings."""
    return mean(reciprocal_ranks(ranks))


def by_group(
    queries: Ints, groups: Sequence[str], exact: Ints, through_index: Ints | None, ks: Sequence[int]
) -> list[GroupFigures]:
    """Figures of each group, the largest first; a query counts in each group of one of its right items.

    Args:
        queries: int64 (R,), the query of each right answer.
        groups: R names.
        exact: int64 (Q,), ranks by exact search.
        through_index: int64 (Q,), ranks through the index, where there is one.
        ks: ranks to report.
    """
    names, codes = np.unique(np.array(groups, dtype=object), return_inverse=True)
    order = np.argsort(codes, kind="stable")
    members = np.split(queries[order], np.cumsum(np.bincount(codes))[:-1])
    by_name = {name: np.unique(own) for name, own in zip(names.tolist(), members, strict=True)}
    return [
        GroupFigures(
            name=name,
            num_queries=len(own),
            is_small=len(own) < SMALL_GROUP,
            r_at=recalls(exact[own], ks),
            mrr=mean_reciprocal_rank(exact[own]),
            r_at_through_index=None if through_index is None else recalls(through_index[own], ks),
        )
        for name, own in sorted(by_name.items(), key=lambda each: -len(each[1]))
    ]
