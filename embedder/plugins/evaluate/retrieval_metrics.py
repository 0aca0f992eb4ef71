"""Metrics of retrieval from ranks, of all queries and of groups, with their 95 % confidence intervals.

A share (R@k) has Wilson's score interval, which stays within [0, 1] and holds for few queries and for shares near 0
and 1. A mean of other values (MRR, recall@k) has the percentile bootstrap over queries, with a fixed seed.

Sources: E. B. Wilson, Probable inference, JASA 22 (1927); L. D. Brown, T. T. Cai, A. DasGupta, Interval estimation for
a binomial proportion, Statistical Science 16 (2001), who recommend it; B. Efron, R. Tibshirani, An Introduction to the
Bootstrap (1993), chapter 13.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from embedder.plugins.evaluate.evaluate_report import SMALL_GROUP, ConfidenceInterval, GroupFigures
from embedder.plugins.evaluate.exact import Ints
from embedder.retrieval.rank_metrics import reciprocal_ranks

Values = np.ndarray[Any, np.dtype[Any]]

Z_95 = 1.959963984540054  # 97.5 % of a normal distribution lie below
NUM_RESAMPLES = 1000
SEED = 1
MAX_DRAWS = 1 << 18  # held at once


def share(is_hit: Values) -> ConfidenceInterval:
    """Share of true values, bool (Q,) or zeros and ones, with Wilson's interval; at least one value."""
    num, found = len(is_hit), float(np.mean(is_hit))
    squared = Z_95**2 / num
    centre = (found + squared / 2) / (1 + squared)
    reach = Z_95 / (1 + squared) * math.sqrt(found * (1 - found) / num + squared / (4 * num))
    # At 0 and 1 the formula gives the bound itself, except for the last digit.
    return ConfidenceInterval(
        value=found, low=max(0.0, min(found, centre - reach)), high=min(1.0, max(found, centre + reach))
    )


def mean(values: Values, max_draws: int = MAX_DRAWS) -> ConfidenceInterval:
    """Mean of values in [0, 1], (Q,), with its bootstrap interval; of only zeros and ones it is a share, with Wilson's.

    Resampling identical values would give an interval of no width. `max_draws` is the number of values drawn at once:
    it bounds the memory and changes nothing else. At least one value.
    """
    if np.isin(values, (0, 1)).all():
        return share(values)
    rng = np.random.default_rng(SEED)
    num, means = len(values), np.empty(NUM_RESAMPLES)
    step = max(1, max_draws // num)
    for start in range(0, NUM_RESAMPLES, step):
        part = means[start : start + step]
        part[:] = values[rng.integers(0, num, (len(part), num))].mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    found = float(np.mean(values))
    return ConfidenceInterval(value=found, low=min(found, float(low)), high=max(found, float(high)))


def recalls(ranks: Ints, ks: Sequence[int]) -> dict[int, ConfidenceInterval]:
    """R@k by k, from `ranks`, int64 (Q,): the number of wrong items before the right one."""
    return {k: share(ranks < k) for k in ks}


def mean_reciprocal_rank(ranks: Ints) -> ConfidenceInterval:
    """MRR over whole rankings."""
    return mean(reciprocal_ranks(ranks))


def by_group(
    queries: Ints, groups: Sequence[str], exact: Ints, through_index: Ints | None, ks: Sequence[int]
) -> list[GroupFigures]:
    """Figures of each group, the largest first; a query counts in each group of one of its right items.

    `queries` is the query of each right answer, int64 (R,), and `groups` the answer's group. `exact` and
    `through_index` are ranks, int64 (Q,); the latter is None without an index.
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
