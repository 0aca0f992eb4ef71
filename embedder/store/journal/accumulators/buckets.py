"""Buckets of numbers by size: 128 to each doubling, on both sides of zero, so within 0.4 % of each number.

A number's bucket follows from its bits: exponent and leading digits, as in HdrHistogram. Logarithms would round
differently from machine to machine, and a number on a border would change its bucket with them.
"""

from collections.abc import Mapping

import numpy as np

from embedder.store.journal.accumulators.base import Floats

PER_DOUBLING = 128
OFFSET = 1100 * PER_DOUBLING  # above the smallest exponent's: keys of positive numbers are positive


def count_buckets(values: Floats) -> dict[str, int]:
    """Count finite values, float64 (N,), by the keys of their buckets."""
    fractions, exponents = np.frexp(np.abs(values))
    inner = np.floor(fractions * 2 * PER_DOUBLING).astype(np.int64) - PER_DOUBLING
    keys = np.where(values == 0, 0, np.sign(values) * (exponents * PER_DOUBLING + inner + OFFSET)).astype(np.int64)
    found, counts = np.unique(keys, return_counts=True)
    return dict(zip(map(str, found.tolist()), counts.tolist(), strict=True))


def middle_of(key: int) -> float:
    """Middle of a bucket."""
    if key == 0:
        return 0.0
    exponent, inner = divmod(abs(key) - OFFSET, PER_DOUBLING)
    return float(np.sign(key) * np.ldexp((inner + PER_DOUBLING + 0.5) / (2 * PER_DOUBLING), exponent))


def in_order(counts: Mapping[str, int]) -> list[tuple[int, int]]:
    """Keys with their counts, from the smallest numbers to the largest."""
    return sorted((int(key), count) for key, count in counts.items())
