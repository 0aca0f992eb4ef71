"""Check the intervals of `embedder compare` by simulation: false alarms among equal models, and the power that is told.

    python scripts/check_comparison.py [--trials 1000]

Two equal models: each query is found with a probability of its own, and both models draw from it. So both have the same
R@10 and disagree on many queries. A trial is called equal where no interval leaves out 0: of one comparison, and of 20
groups and all queries together. At 95 % confidence 950 of 1,000 are expected, give or take 14 by chance alone.

Power: the second model loses a stated difference in one group; how often is that shown, and how often was told?
Ends with one JSON line; exit 1 where the figures are out of bounds. CPU-bound, in NumPy, one thread: a minute.
"""

import argparse
import json
import sys
from collections.abc import Callable

import numpy as np

from embedder.retrieval.paired import EVERYTHING, Thresholds, paired_difference, paired_differences

NUM_GROUPS, PER_GROUP, NUM_QUERIES = 20, 200, 1000
LOSS = 0.1
BOUNDS = (930, 970)  # of 1,000
MAX_POWER_ERROR = 0.07
LIMITS = Thresholds(max_drop=LOSS)
RESAMPLES = 20_000


def hits(rng: np.random.Generator, num: int) -> tuple[np.ndarray, np.ndarray]:
    """Hits of two equal models on the same queries, some of which are harder than others."""
    chance = rng.beta(2, 1, num)
    return tuple((rng.random(num) < chance).astype(np.float64) for _ in range(2))


def ranked(rng: np.random.Generator, num: int) -> tuple[np.ndarray, np.ndarray]:
    """Reciprocal ranks of two equal models: values of many sizes."""
    scale = rng.exponential(3.0, num)
    return tuple(1 / (1 + np.floor(rng.exponential(scale))) for _ in range(2))


def num_equal(draw: Callable, num_trials: int, seed: int) -> int:
    """Trials of one comparison that are called equal."""
    rng = np.random.default_rng(seed)
    return sum(
        paired_difference(*draw(rng, NUM_QUERIES), LIMITS, num_resamples=2000).is_equal for _ in range(num_trials)
    )


def num_equal_groups(draw: Callable, num_trials: int, seed: int) -> int:
    """Trials in which all groups and all queries are called equal."""
    rng, called = np.random.default_rng(seed), 0
    groups = {str(number): np.arange(PER_GROUP) + PER_GROUP * number for number in range(NUM_GROUPS)}
    for _ in range(num_trials):
        before, after = draw(rng, NUM_GROUPS * PER_GROUP)
        called += all(each.is_equal for each in paired_differences(before, after, groups, LIMITS, RESAMPLES))
    return called


def power(num_trials: int, seed: int) -> tuple[float, float]:
    """Share of trials in which a loss in one group is shown, and the mean of what was told by equal models before."""
    rng, told, shown = np.random.default_rng(seed), [], 0
    for _ in range(num_trials):
        before, after = hits(rng, PER_GROUP)
        told.append(paired_difference(before, after, LIMITS, EVERYTHING, NUM_GROUPS + 1, RESAMPLES).power)
        lost = rng.random(PER_GROUP) < LOSS / (2 / 3)  # of the hits, two thirds of the queries
        found = paired_difference(before, np.where(lost, 0, after), LIMITS, EVERYTHING, NUM_GROUPS + 1, RESAMPLES)
        shown += found.high < 0
    return shown / num_trials, float(np.mean(told))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000)
    trials = parser.parse_args().trials
    shown, told = power(trials, seed=3)
    found = {
        "trials": trials,
        "equal_r_at_10": num_equal(hits, trials, seed=0),
        "equal_mrr": num_equal(ranked, trials, seed=1),
        "equal_20_groups": num_equal_groups(hits, trials, seed=2),
        "power_told": round(told, 3),
        "power_shown": round(shown, 3),
        "loss": LOSS,
        "queries_per_group": PER_GROUP,
    }
    inside = all(
        BOUNDS[0] * trials <= 1000 * value <= BOUNDS[1] * trials
        for name, value in found.items()
        if name.startswith("equal")
    )
    sys.stdout.write(json.dumps(found | {"passed": inside and abs(shown - told) < MAX_POWER_ERROR}) + "\n")
    sys.exit(0 if inside and abs(shown - told) < MAX_POWER_ERROR else 1)


if __name__ == "__main__":
    main()
