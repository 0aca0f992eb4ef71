"""Paired differences of a retrieval metric between two models, by group of queries, in plain NumPy.

Both models answer the same queries, so each query gives one difference, and the mean of these has an interval by the
bootstrap over queries: of R@k, whose differences are -1, 0 and 1, its distribution itself, of other metrics that of
resamples. Its percentiles are moved outwards for few queries, as percentiles of a small sample are too narrow. Several
groups are several chances to be fooled: of G comparisons each one has the level 1 - alpha / G (Bonferroni), so that
all of them hold together with the confidence that is asked for.

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
MIN_QUERIES = 10  # of fewer, no interval is told
POWER = 0.8
MAX_NAMED = 3
ROUNDING = 1e-9  # 0.2 - 0.18 is a little more than 0.02

_NORMAL = NormalDist()


@dataclass(frozen=True)
class Thresholds:
    """Rule of a verdict on differences.

    Attributes:
        max_drop: loss that is allowed in any group.
        confidence: share of cases in which all intervals together hold what is true.
        prove: whether it must be shown that no group lost more; else it is refused where it is shown that one did.
    """

    max_drop: float = 0.02
    confidence: float = 0.95
    prove: bool = False


@dataclass(frozen=True)
class PairedDifference:
    """Difference of a metric between two models over the same queries.

    Attributes:
        name: of the group.
        num_queries: number of them.
        before: mean of the first model.
        after: mean of the second.
        low: lower end of the interval of `difference`.
        high: its upper end.
        power: probability that a true loss of `max_drop` would be called one.
        detectable: loss that would be called one with a probability of 0.8.
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
        """Second model less the first."""
        return self.after - self.before

    @property
    def is_equal(self) -> bool:
        """Whether no difference is shown."""
        return self.low <= 0 <= self.high

    @property
    def is_small(self) -> bool:
        """Whether it has too few queries for an interval."""
        return self.num_queries < MIN_QUERIES

    def fails(self, limits: Thresholds) -> bool:
        """Whether the group breaks the rule."""
        bound = self.low if limits.prove else self.high
        return bound < -limits.max_drop - ROUNDING


def paired_differences(
    before: Floats, after: Floats, groups: Mapping[str, Ints], limits: Thresholds, num_resamples: int = NUM_RESAMPLES
) -> list[PairedDifference]:
    """Compare two models over all queries, and in each group; the groups in the order given, behind all queries.

    Args:
        before: float64 (Q,), the metric of each query by the first model; Q is at least 1.
        after: float64 (Q,), by the second.
        groups: numbers of the queries of each group; a query may be in several, a group without one is left out.
        limits: confidence, and the loss whose power is told.
        num_resamples: of each interval.
    """
    named = {EVERYTHING: np.arange(len(before)), **{name: own for name, own in groups.items() if len(own)}}
    return [
        paired_difference(before[own], after[own], limits, name, len(named), num_resamples)
        for name, own in named.items()
    ]


def paired_difference(
    before: Floats,
    after: Floats,
    limits: Thresholds,
    name: str = EVERYTHING,
    num_comparisons: int = 1,
    num_resamples: int = NUM_RESAMPLES,
) -> PairedDifference:
    """Compare two models over one group of queries.

    Args:
        before: float64 (Q,), by the first model; Q is at least 1.
        after: float64 (Q,), by the second.
        limits: confidence, and the loss whose power is told.
        name: of the group.
        num_comparisons: comparisons that should hold together.
        num_resamples: of the interval.
    """
    differences = np.asarray(after, np.float64) - before
    level, num = (1 - limits.confidence) / num_comparisons, len(differences)
    low, high = interval(differences, level, num_resamples)
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
    """Probability that a true loss is called one.

    A loss adds to the variance of the differences, at most as much as if it were queries that go from 1 to 0.
    """
    error = math.sqrt((variance + loss) / num_queries)
    return _NORMAL.cdf(loss / error - _NORMAL.inv_cdf(1 - level / 2)) if error else level / 2


def detectable_loss(variance: float, num_queries: int, level: float) -> float:
    """Loss that is called one with the probability `POWER`: where `power_of` has that value; at most 1."""
    squared = (_NORMAL.inv_cdf(1 - level / 2) + _NORMAL.inv_cdf(POWER)) ** 2 / num_queries
    return min(1.0, (squared + math.sqrt(squared**2 + 4 * squared * variance)) / 2)


def interval(differences: Floats, level: float, num_resamples: int = NUM_RESAMPLES) -> tuple[float, float]:
    """Bootstrap interval of a mean of paired differences.

    Where all differences are one value, resampling would give an interval of no width: then it is as wide as what
    chance may hide from so many queries. Of fewer than `MIN_QUERIES` it is everything.

    Args:
        differences: float64 (Q,), each in [-1, 1].
        level: probability that the truth is outside.
        num_resamples: B.
    """
    num, centre = len(differences), float(np.mean(differences))
    if num < MIN_QUERIES:
        return -1.0, 1.0
    values, counts = np.unique(differences, return_counts=True)
    if len(values) == 1:
        reach = 1 - (level / 2) ** (1 / num)  # the share of other values that none of `num` shows
        return max(-1.0, centre - reach), min(1.0, centre + reach)
    outside = _NORMAL.cdf(-math.sqrt(num / (num - 1)) * student_quantile(1 - level / 2, num - 1))
    if set(values.tolist()) <= {-1.0, 0.0, 1.0}:
        low, high = _percentiles_of_hits(differences, outside)
    else:
        means = _resampled_means(differences, values, counts, num_resamples)
        low, high = (float(each) for each in np.quantile(means, (outside, 1 - outside)))
    return min(centre, low), max(centre, high)


def _percentiles_of_hits(differences: Floats, outside: float) -> tuple[float, float]:
    """Both percentiles of the mean of a resample of -1, 0 and 1.

    The sum of Q draws has the distribution of one draw, convolved with itself: a power of its Fourier transform.

    Args:
        differences: float64 (Q,).
        outside: probability below the first, and above the second.
    """
    num = len(differences)
    one = np.array([(differences == value).mean() for value in (-1, 0, 1)])
    sums = np.fft.irfft(np.fft.rfft(one, 2 * num + 1) ** num, 2 * num + 1)  # of -Q to Q
    low = int(np.searchsorted(np.cumsum(sums), outside))
    high = 2 * num - int(np.searchsorted(np.cumsum(sums[::-1]), outside))
    return low / num - 1, high / num - 1


def _resampled_means(differences: Floats, values: Floats, counts: Ints, num_resamples: int) -> Floats:
    """Means of B resamples, (B,): by how often each value is drawn where there are few values."""
    rng, num = np.random.default_rng(SEED), len(differences)
    if 4 * len(values) < num:
        drawn = rng.multinomial(num, counts / num, num_resamples)
        return np.asarray(drawn @ values / num, np.float64)
    means = np.empty(num_resamples)
    step = max(1, MAX_DRAWS // num)
    for start in range(0, num_resamples, step):
        part = means[start : start + step]
        part[:] = differences[rng.integers(0, num, (len(part), num))].mean(axis=1)
    return means


def student_quantile(probability: float, freedom: int) -> float:
    """Quantile of Student's t, to about 1 % from nine degrees of freedom on at the levels that are used here.

    Args:
        probability: above 0.5, below 1.
        freedom: degrees of freedom.

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
    """Groups that break the rule, the worst first."""
    return sorted((each for each in differences if each.fails(limits)), key=lambda each: each.difference)


def describe_failures(differences: list[PairedDifference], limits: Thresholds, metric: str) -> str:
    """Describe the groups that break the rule in one line; empty where none does."""
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
    """Queries of each group, the largest group first.

    Args:
        names: R names of groups, one for each right answer.
        queries: int64 (R,), the query of each.
    """
    if not len(names):
        return {}
    found, codes = np.unique(np.array(names, dtype=object), return_inverse=True)
    order = np.argsort(codes, kind="stable")
    parts = np.split(queries[order], np.cumsum(np.bincount(codes, minlength=len(found)))[:-1])
    members = {str(name): np.unique(own) for name, own in zip(found.tolist(), parts, strict=True)}
    return dict(sorted(members.items(), key=lambda each: -len(each[1])))
