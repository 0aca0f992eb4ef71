"""Accumulators of columns of numbers: count, sum, moments, quantiles."""

import math
from fractions import Fraction

import numpy as np
import pyarrow as pa

from embedder.store.journal.accumulators.base import (
    Accumulator,
    Figures,
    Floats,
    State,
    added_counts,
    as_floats,
    valid_rows,
)
from embedder.store.journal.accumulators.buckets import count_buckets, in_order, middle_of
from embedder.store.journal.accumulators.exact_sums import add_each, as_fraction, nearest, power_sums, root_of

COUNTS = ("num", "num_null", "num_not_finite")


class Count(Accumulator):
    """Rows, and those with a value."""

    def add(self, rows: pa.Table) -> State:
        """Count the values of any column; without one, rows."""
        if not self.columns:
            return {"num": rows.num_rows, "num_null": 0}
        _, num_null = valid_rows(rows, self.columns)
        return {"num": rows.num_rows - num_null, "num_null": num_null}

    def merge(self, first: State, second: State) -> State:
        """Add the counts."""
        return {name: first[name] + second[name] for name in ("num", "num_null")}

    def figures(self, state: State) -> Figures:
        """The counts."""
        return dict(state)


class _OfNumbers(Accumulator):
    """Accumulator of the finite values of one column, with their counts and range."""

    def add(self, rows: pa.Table) -> State:
        """Describe the column's values; NaN and infinity count in `num_not_finite` alone."""
        (column,), num_null = valid_rows(rows, self.columns)
        values = as_floats(column)
        finite = values[np.isfinite(values)]
        lowest, highest = (float(finite.min()), float(finite.max())) if len(finite) else (None, None)
        counts = {"num": len(finite), "num_null": num_null, "num_not_finite": len(values) - len(finite)}
        return {**counts, "min": lowest, "max": highest, **self.of_values(finite)}

    def merge(self, first: State, second: State) -> State:
        """Add counts, widen the range, merge the rest."""
        counts = {name: first[name] + second[name] for name in COUNTS}
        lows, highs = ([each[name] for each in (first, second) if each["num"]] for name in ("min", "max"))
        ends = {"min": min(lows, default=None), "max": max(highs, default=None)}
        return {**counts, **ends, **self.merge_values(first, second)}

    def figures(self, state: State) -> Figures:
        """Counts, range, and what is computed of the rest."""
        plain = {name: state[name] for name in (*COUNTS, "min", "max")}
        return {**plain, **(self.figures_of_values(state) if state["num"] else {})}

    def of_values(self, values: Floats) -> State:
        """Describe finite values, float64 (N,)."""
        raise NotImplementedError

    def merge_values(self, first: State, second: State) -> State:
        """Merge what `of_values` returned."""
        raise NotImplementedError

    def figures_of_values(self, state: State) -> Figures:
        """Compute the figures of at least one value."""
        raise NotImplementedError


class Moments(_OfNumbers):
    """Sum, mean, variance, skewness and excess kurtosis, exact until the last rounding; of `sum` the first two."""

    @property
    def num_powers(self) -> int:
        """Powers whose sums are kept."""
        return 1 if self.config.kind == "sum" else 4

    def of_values(self, values: Floats) -> State:
        """Sum the powers."""
        return {"sums": power_sums(values, self.num_powers)}

    def merge_values(self, first: State, second: State) -> State:
        """Add the sums."""
        return {"sums": add_each(first["sums"], second["sums"])}

    def figures_of_values(self, state: State) -> Figures:
        """Moments of the values that there are: the variance is that of a whole population."""
        sums, num = [as_fraction(total) for total in state["sums"]], state["num"]
        means = [total / num for total in sums]
        found: Figures = {"sum": nearest(sums[0]), "mean": nearest(means[0])}
        if self.num_powers == 1:
            return found
        variance, third, fourth = central_moments(means)
        found |= {"variance": nearest(variance), "std": root_of(variance)}
        if variance:
            size = root_of(third**2 / variance**3)
            found |= {"skewness": -size if size and third < 0 else size, "kurtosis": nearest(fourth / variance**2 - 3)}
        return found


def central_moments(means: list[Fraction]) -> tuple[Fraction, Fraction, Fraction]:
    """Second to fourth central moment of the means of the first four powers."""
    first, second, third, fourth = means
    return (
        second - first**2,
        third - 3 * first * second + 2 * first**3,
        fourth - 4 * first * third + 6 * first**2 * second - 3 * first**4,
    )


class Quantiles(_OfNumbers):
    """Quantiles within 0.4 % of the value, by a histogram with 128 buckets to each doubling."""

    def of_values(self, values: Floats) -> State:
        """Count the buckets."""
        return {"buckets": count_buckets(values)}

    def merge_values(self, first: State, second: State) -> State:
        """Add the counts."""
        return {"buckets": added_counts(first["buckets"], second["buckets"])}

    def figures_of_values(self, state: State) -> Figures:
        """Value below or at which that part of the values lies, as `p50`."""
        buckets = in_order(state["buckets"])
        ends = np.cumsum([count for _, count in buckets])
        found: Figures = {}
        for quantile in self.config.quantiles:
            rank = max(1, math.ceil(Fraction(repr(quantile)) * state["num"]))
            key, _ = buckets[int(np.searchsorted(ends, rank))]
            found[f"p{100 * quantile:g}"] = min(max(middle_of(key), state["min"]), state["max"])
        return found
