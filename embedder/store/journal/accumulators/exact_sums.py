"""Exact sums of float64 values and of their powers, as integers times a power of two.

Each float64 is such a number, and so are products and sums of them: nothing is rounded before the figures. In JSON a
sum is [mantissa in hexadecimal, exponent], with an odd mantissa, so that equal sums are equal text.
"""

import math
from collections.abc import Iterable
from fractions import Fraction

import numpy as np

from embedder.store.journal.accumulators.base import Floats

MANTISSA_BITS = 53

ExactSum = list[str | int]


def power_sums(values: Floats, num_powers: int) -> list[ExactSum]:
    """Sum the values, their squares, cubes, and so on.

    Args:
        values: finite; float64 (N,).
        num_powers: how many sums.
    """
    if not len(values):
        return [_normal(0, 0) for _ in range(num_powers)]
    fractions, exponents = np.frexp(values)
    lowest = int(exponents.min()) - MANTISSA_BITS
    whole = np.ldexp(fractions, MANTISSA_BITS).astype(np.int64).tolist()
    shifts = (exponents - exponents.min()).tolist()
    numbers = [number << shift for number, shift in zip(whole, shifts, strict=True)]
    return [_normal(sum(number**power for number in numbers), power * lowest) for power in range(1, num_powers + 1)]


def add_exact(first: ExactSum, second: ExactSum) -> ExactSum:
    """Sum of two sums."""
    (mantissa, exponent), (other, further) = _pair(first), _pair(second)
    lowest = min(exponent, further)
    return _normal((mantissa << (exponent - lowest)) + (other << (further - lowest)), lowest)


def add_each(first: Iterable[ExactSum], second: Iterable[ExactSum]) -> list[ExactSum]:
    """Sums of the pairs of two lists of sums."""
    return [add_exact(*pair) for pair in zip(first, second, strict=True)]


def as_fraction(total: ExactSum) -> Fraction:
    """The sum itself."""
    mantissa, exponent = _pair(total)
    return Fraction(mantissa) * Fraction(2) ** exponent


def nearest(value: Fraction) -> float | None:
    """The float64 next to a number; none beyond the largest, as JSON has no infinity."""
    try:
        return float(value)
    except OverflowError:
        return None


def root_of(value: Fraction) -> float | None:
    """Square root of a number that may itself be beyond the range of float64; none where the root is, too."""
    if not value:
        return 0.0
    shift = (value.numerator.bit_length() - value.denominator.bit_length()) // 2
    try:
        return math.ldexp(math.sqrt(float(value / Fraction(4) ** shift)), shift)
    except OverflowError:
        return None


def _pair(total: ExactSum) -> tuple[int, int]:
    return int(str(total[0]), 16), int(total[1])


def _normal(mantissa: int, exponent: int) -> ExactSum:
    if not mantissa:
        return ["0x0", 0]
    num_zeros = (mantissa & -mantissa).bit_length() - 1
    return [hex(mantissa >> num_zeros), exponent + num_zeros]
