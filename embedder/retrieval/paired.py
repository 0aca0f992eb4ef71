"""Paired differences of a retrieval metric between two models, by group of queries, in plain NumPy.

Both models answer the same queries, so each query gives one difference. The mean of these gets a bootstrap interval
over queries: for R@k, whose differences are -1, 0 and 1, from the exact distribution; for other metrics from resamples.
Percentiles of a small sample are too narrow, so for few queries they are moved outwards. Of G comparisons each has the
level 1 - alpha / G (Bonferroni), so that all of them hold together with the requested confidence.

Sources: B. Efron, R. Tibshirani, An Introduction to the Bootstrap (1993), chapter 13; T. Hesterberg, What Teachers
Should Know About the Bootstrap, The American Statistician 69 (2015), the expanded percentile interval; T. Sakai,
Evaluating evaluation metrics based on the bootstrap, SIGIR (2006), of paired differences over queries.

Legend: `Q` queries, `K` different values, `B` resamples.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

EVERYTHING = "(all)"
SEED = 1
NUM_RESAMPLES = 20_000
MAX_DRAWS = 1 << 20  # held at once
MIN_QUERIES = 10  # fewer get no interval
POWER = 0.8
MAX_NAMED = 3
ROUNDING = 1e-9  # 0.2 - 0.18 is a little more than 0.02

_NORMAL = NormalDist()


@dataclass(frozen=True)
class Thresholds:
    """Rule for a verdict: no group may lose more than `max_drop`, at a `confidence` for all intervals together.

    With `prove` it must be shown that no group lost more; else only a proven larger loss fails.
    """

    max_drop: float = 0.02
    confidence: float = 0.95
    prove: bool = False


@dataclass(frozen=True)
class PairedDifference:
    """Difference of a metric between two models over the same queries.

    `before` and `after` are the means of the two models; `low` and `high` the ends of the interval of `difference`.
    `power` is the probability that a true loss of `max_drop` would be detected; `detectable` the loss detected with
    probability 0.8.
    """

    name: str
    num_queries: int
    before: float
    after: float
    low: float
    high: float
    power: float
    detectable: float

    @property
    def difference(self) -> float:
        """Mean of the second model minus that of the first."""
        return self.after - self.before

    @property
    def is_equal(self) -> bool:
        """Whether no difference is shown."""
        return self.low <= 0 <= self.high

    @property
    def is_small(self) -> bool:
        """Whether there are too few queries for an interval."""
        return self.num_queries < MIN_QUERIES

    def fails(self, limits: Thresholds) -> bool:
        """Whether the group breaks the rule."""
        bound = self.low if limits.prove else self.high
        return bound < -limits.max_drop - ROUNDING


def paired_differences(
    before: Floats, after: Floats, groups: Mapping[str, Ints], limits: Thresholds
) -> list[PairedDifference]:
    """Compare two models over all queries, then in each group, in the order given.

    `before` and `after`, float64 (Q,) with Q at least 1, are the metric of each query by either model. `groups` has the
    numbers of each group's queries; a query may be in several, and empty groups are left out.
    """
    named = {EVERYTHING: np.arange(len(before)), **{name: own for name, own in groups.items() if len(own)}}
    return [paired_difference(before[own], after[own], limits, name, len(named)) for name, own in named.items()]


def paired_difference(
    before: Floats, after: Floats, limits: Thresholds, name: str = EVERYTHING, num_comparisons: int = 1
) -> PairedDifference:
    """Compare two models over one group of queries.

    `before` and `after`, float64 (Q,) with Q at least 1, are the metric of each query by either model.
    `num_comparisons` is the number of comparisons that should hold together.
    """
    differences = np.asarray(after, np.float64) - before
    level, num = (1 - limits.confidence) / num_comparisons, len(differences)
    low, high = interval(differences, level)
    variance = float(differences.var(ddof=1)) if num > 1 else 0.0
    is_small = num < MIN_QUERIES
    return PairedDifference(
        name=name,
        num_queries=num,
        before=float(np.mean(before)),
        after=float(np.mean(after)),
        low=low,
        high=high,
        power=0.0 if is_small else power_of(limits.max_drop, variance, num, level),
        detectable=1.0 if is_small else detectable_loss(variance, num, level),
    )


def power_of(loss: float, variance: float, num_queries: int, level: float) -> float:
    """Return the probability that a true loss is detected.

    A loss adds to the variance of the differences, at most as if it consisted of queries that go from 1 to 0.
    """
    error = math.sqrt((variance + loss) / num_queries)
    return _NORMAL.cdf(loss / error - _NORMAL.inv_cdf(1 - level / 2)) if error else level / 2


def detectable_loss(variance: float, num_queries: int, level: float) -> float:
    """Return the loss, at most 1, that is detected with the probability `POWER`: the inverse of `power_of`."""
    squared = (_NORMAL.inv_cdf(1 - level / 2) + _NORMAL.inv_cdf(POWER)) ** 2 / num_queries
    return min(1.0, (squared + math.sqrt(squared**2 + 4 * squared * variance)) / 2)


def interval(differences: Floats, level: float) -> tuple[float, float]:
    """Return the bootstrap interval of a mean of paired differences, float64 (Q,), each in [-1, 1].

    `level` is the probability that the truth is outside. If all differences are equal, resampling would give a zero
    width: the interval is then as wide as what chance may hide from so many queries. For fewer than `MIN_QUERIES` it is
    [-1, 1].
    """
    num, centre = len(differences), float(np.mean(differences))
    if num < MIN_QUERIES:
        return -1.0, 1.0
    values, counts = np.unique(differences, return_counts=True)
    if len(values) == 1:
        reach = 1 - (level / 2) ** (1 / num)  # the share of other values that may be absent from `num` queries
        return max(-1.0, centre - reach), min(1.0, centre + reach)
    outside = _NORMAL.cdf(-math.sqrt(num / (num - 1)) * student_quantile(1 - level / 2, num - 1))
    if set(values.tolist()) <= {-1.0, 0.0, 1.0}:
        low, high = _percentiles_of_hits(differences, outside)
    else:
        means = _resampled_means(differences, values, counts)
        low, high = (float(each) for each in np.quantile(means, (outside, 1 - outside)))
    return min(centre, low), max(centre, high)


def _percentiles_of_hits(differences: Floats, outside: float) -> tuple[float, float]:
    """Return the percentiles with probability `outside` below and above, of the mean of a resample of -1, 0 and 1.

    The sum of Q draws has the distribution of one draw convolved with itself: a power of its Fourier transform.
    """
    num = len(differences)
    one = np.array([(differences == value).mean() for value in (-1, 0, 1)])
    sums = np.fft.irfft(np.fft.rfft(one, 2 * num + 1) ** num, 2 * num + 1)  # from -Q to Q
    low = int(np.searchsorted(np.cumsum(sums), outside))
    high = 2 * num - int(np.searchsorted(np.cumsum(sums[::-1]), outside))
    return low / num - 1, high / num - 1


def _resampled_means(differences: Floats, values: Floats, counts: Ints) -> Floats:
    """Return the means of B resamples, (B,); few different values are drawn by their counts."""
    rng, num = np.random.default_rng(SEED), len(differences)
    if 4 * len(values) < num:
        drawn = rng.multinomial(num, counts / num, NUM_RESAMPLES)
        return np.asarray(drawn @ values / num, np.float64)
    means = np.empty(NUM_RESAMPLES)
    step = max(1, MAX_DRAWS // num)
    for start in range(0, NUM_RESAMPLES, step):
        part = means[start : start + step]
        part[:] = differences[rng.integers(0, num, (len(part), num))].mean(axis=1)
    return means


def student_quantile(probability: float, freedom: int) -> float:
    """Return a quantile of Student's t, to about 1 % from nine degrees of freedom on at the levels used here.

    `probability` is above 0.5 and below 1.

    Source: M. Abramowitz, I. Stegun, Handbook of Mathematical Functions (1964), 26.7.5.
    """
    z = _NORMAL.inv_cdf(probability)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return float(sum(term / freedom**power for power, term in enumerate(terms)))


def failures(differences: list[PairedDifference], limits: Thresholds) -> list[PairedDifference]:
    """Return the groups that break the rule, worst first."""
    return sorted((each for each in differences if each.fails(limits)), key=lambda each: each.difference)


def describe_failures(differences: list[PairedDifference], limits: Thresholds, metric: str) -> str:
    """Describe the groups that break the rule in one line; empty if none does."""
    found = failures(differences, limits)
    if not found:
        return ""
    said = [
        f"{each.name} {each.before:.3f} -> {each.after:.3f} "
        f"({each.difference:+.3f}, {each.low:+.3f} to {each.high:+.3f})"
        for each in found[:MAX_NAMED]
    ]
    more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    rule = "it is not shown that no group lost" if limits.prove else "shown to have lost"
    return (
        f"{metric}, {rule} more than compare.max_drop = {limits.max_drop:g} at {limits.confidence:.0%} confidence: "
        f"{'; '.join(said)}{more}"
    )


def members_of(names: list[Any] | NDArray[Any], queries: Ints) -> dict[str, Ints]:
    """Return the queries of each group, largest group first.

    `names` has R group names, one for each right answer; `queries`, int64 (R,), the query of each.
    """
    if not len(names):
        return {}
    found, codes = np.unique(np.array(names, dtype=object), return_inverse=True)
    order = np.argsort(codes, kind="stable")
    parts = np.split(queries[order], np.cumsum(np.bincount(codes, minlength=len(found)))[:-1])
    members = {str(name): np.unique(own) for name, own in zip(found.tolist(), parts, strict=True)}
    return dict(sorted(members.items(), key=lambda each: -len(each[1])))
