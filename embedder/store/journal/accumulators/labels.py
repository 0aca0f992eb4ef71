"""Accumulators of a column against a column of labels: log loss, AUROC, confusion."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa

from embedder.store.journal.accumulators.base import (
    Accumulator,
    Figures,
    Floats,
    State,
    added_counts,
    as_floats,
    share,
    valid_rows,
)
from embedder.store.journal.accumulators.buckets import count_buckets, in_order
from embedder.store.journal.accumulators.exact_sums import add_exact, as_fraction, nearest, power_sums

LEAST = 2.0**-53  # of a probability: a certain mistake costs 36.7, not infinity
MAX_CELLS = 10_000
Mask = np.ndarray[Any, np.dtype[np.bool_]]
COUNTS = ("num", "num_null", "num_invalid")


class _Scored(Accumulator):
    """Accumulator of scores against labels that are 0 or 1."""

    def read_scores(self, rows: pa.Table) -> tuple[Floats, Floats, State]:
        """Scores and labels that can be judged, float64 (N,) each, and the counts.

        A label that is neither 0 nor 1, and a score that is out of the range, count in `num_invalid` alone.
        """
        (scores, labels), num_null = valid_rows(rows, self.columns)
        values, truth = as_floats(scores), as_floats(labels)
        good = np.isin(truth, (0, 1)) & self.is_score(values)
        num = int(good.sum())
        return values[good], truth[good], {"num": num, "num_null": num_null, "num_invalid": len(values) - num}

    def is_score(self, values: Floats) -> Mask:
        """Mask of the values that are scores; any finite one is."""
        return np.isfinite(values)


class LogLoss(_Scored):
    """Mean of minus the logarithm of the probability that was given to what was true."""

    def add(self, rows: pa.Table) -> State:
        """Sum the losses; each is rounded, their sum is not."""
        values, truth, counts = self.read_scores(rows)
        given = np.clip(np.where(truth == 1, values, 1 - values), LEAST, 1)
        losses = np.array([-math.log(each) for each in given.tolist()])  # NumPy's differs between machines
        return {**counts, "sum": power_sums(losses, 1)[0]}

    def merge(self, first: State, second: State) -> State:
        """Add counts and sums."""
        counts = {name: first[name] + second[name] for name in COUNTS}
        return {**counts, "sum": add_exact(first["sum"], second["sum"])}

    def figures(self, state: State) -> Figures:
        """Counts and the mean."""
        counts = {name: state[name] for name in COUNTS}
        return {**counts, "log_loss": nearest(as_fraction(state["sum"]) / state["num"]) if state["num"] else None}

    def is_score(self, values: Floats) -> Mask:
        """Mask of probabilities."""
        return (values >= 0) & (values <= 1)


class Auroc(_Scored):
    """Area under the ROC curve, by histograms of the scores of both labels; scores of one bucket count as equal."""

    def add(self, rows: pa.Table) -> State:
        """Count the buckets of both labels."""
        values, truth, counts = self.read_scores(rows)
        return {**counts, "ones": count_buckets(values[truth == 1]), "zeros": count_buckets(values[truth == 0])}

    def merge(self, first: State, second: State) -> State:
        """Add the counts."""
        counts = {name: first[name] + second[name] for name in COUNTS}
        return {**counts, **{name: added_counts(first[name], second[name]) for name in ("ones", "zeros")}}

    def figures(self, state: State) -> Figures:
        """The area, and by how much the bucketing may have moved it; none where one label is missing."""
        ones, zeros = dict(in_order(state["ones"])), dict(in_order(state["zeros"]))
        num_ones, num_zeros = sum(ones.values()), sum(zeros.values())
        below = twice_won = tied = 0
        for key in sorted({*ones, *zeros}):
            twice_won += ones.get(key, 0) * (2 * below + zeros.get(key, 0))
            tied += ones.get(key, 0) * zeros.get(key, 0)
            below += zeros.get(key, 0)
        num_pairs = num_ones * num_zeros
        counts = {**{name: state[name] for name in COUNTS}, "num_ones": num_ones}
        return {**counts, "auroc": share(twice_won, 2 * num_pairs), "auroc_within": share(tied, 2 * num_pairs)}


class Confusion(Accumulator):
    """Counts of pairs of a true and a predicted class."""

    def add(self, rows: pa.Table) -> State:
        """Count the pairs; classes are told by their text."""
        (predicted, truth), num_null = valid_rows(rows, self.columns)
        names = [[str(value) for value in column.to_pylist()] for column in (truth, predicted)]
        counts = Counter(zip(*names, strict=True))
        cells = [[*pair, count] for pair, count in sorted(counts.items())]
        return _limit_cells({"num": len(predicted), "num_null": num_null, "cells": cells})

    def merge(self, first: State, second: State) -> State:
        """Add the counts."""
        counts = {name: first[name] + second[name] for name in ("num", "num_null")}
        if first["cells"] is None or second["cells"] is None:
            return {**counts, "cells": None}
        cells: Counter[tuple[str, str]] = Counter()
        for truth, predicted, count in (*first["cells"], *second["cells"]):
            cells[truth, predicted] += count
        return _limit_cells({**counts, "cells": [[*pair, count] for pair, count in sorted(cells.items())]})

    def figures(self, state: State) -> Figures:
        """Accuracy, mean F1 of the classes, and the matrix: counts by the true class, then the predicted one."""
        counts = {name: state[name] for name in ("num", "num_null")}
        if state["cells"] is None:
            return {**counts, "error": f"more than {MAX_CELLS:,} pairs of classes; are these columns of classes?"}
        matrix: dict[str, dict[str, int]] = {}
        true, given, right = Counter[str](), Counter[str](), Counter[str]()
        for truth, predicted, count in state["cells"]:
            matrix.setdefault(truth, {})[predicted] = count
            true[truth] += count
            given[predicted] += count
            right[truth] += count if truth == predicted else 0
        scores = [2 * right[name] / (true[name] + given[name]) for name in sorted({*true, *given})]
        mean_f1 = math.fsum(scores) / len(scores) if scores else None
        return {**counts, "accuracy": share(right.total(), state["num"]), "mean_f1": mean_f1, "matrix": matrix}


def _limit_cells(state: State) -> State:
    """The state, without cells where there are too many; a sum of states has at least as many as each of them."""
    return {**state, "cells": None} if len(state["cells"]) > MAX_CELLS else state
