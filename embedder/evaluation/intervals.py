"""Confidence intervals, 95 %, of figures that are measured on a sample of queries.

A share (R@k) has Wilson's score interval, which stays within [0, 1] and holds for few queries and for shares near 0
and 1. A mean of other values (MRR, recall@k) has the percentile bootstrap over queries, with a fixed seed.

Sources: E. B. Wilson, Probable inference, JASA 22 (1927); L. D. Brown, T. T. Cai, A. DasGupta, Interval estimation for
a binomial proportion, Statistical Science 16 (2001), who recommend it; B. Efron, R. Tibshirani, An Introduction to the
Bootstrap (1993), chapter 13.
"""

import math
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

Values = np.ndarray[Any, np.dtype[Any]]

Z_95 = 1.959963984540054  # 97.5 % of a normal distribution lie below
NUM_RESAMPLES = 1000
SEED = 1
MAX_DRAWS = 1 << 18  # held at once


class ConfidenceInterval(BaseModel):
    """A figure with its 95 % confidence interval."""

    model_config = ConfigDict(frozen=True)

    value: float
    low: float
    high: float


def share(is_hit: Values) -> ConfidenceInterval:
    """Share of true values with Wilson's interval.

    Args:
        is_hit: bool (Q,) or zeros and ones, at least one.
    """
    num, found = len(is_hit), float(np.mean(is_hit))
    squared = Z_95**2 / num
    centre = (found + squared / 2) / (1 + squared)
    reach = Z_95 / (1 + squared) * math.sqrt(found * (1 - found) / num + squared / (4 * num))
    # At 0 and 1 the formula gives the bound itself, but for the last digit.
    return ConfidenceInterval(
        value=found, low=max(0.0, min(found, centre - reach)), high=min(1.0, max(found, centre + reach))
    )


def mean(values: Values) -> ConfidenceInterval:
    """Mean with its bootstrap interval; of nothing but zeros and ones it is a share, with that one's interval.

    Resampling values that are all alike would give an interval of no width.

    Args:
        values: (Q,) in [0, 1], at least one.
    """
    if np.isin(values, (0, 1)).all():
        return share(values)
    rng = np.random.default_rng(SEED)
    num, means = len(values), np.empty(NUM_RESAMPLES)
    step = max(1, MAX_DRAWS // num)
    for start in range(0, NUM_RESAMPLES, step):
        part = means[start : start + step]
        part[:] = values[rng.integers(0, num, (len(part), num))].mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    found = float(np.mean(values))
    return ConfidenceInterval(value=found, low=min(found, float(low)), high=max(found, float(high)))
