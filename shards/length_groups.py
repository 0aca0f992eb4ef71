"""Groups of sequences of similar length, each computed in one rectangle of its longest one's width.

Pure, and without torch: stages compute by these groups, the decode step and the planner count by them.
"""

import math
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Lengths = NDArray[np.int64]

MAX_TOKENS = 4096  # of one group; what layers hold at once grows with it, and beyond the caches they are slower
MAX_COMPUTED = 1.1  # tokens computed, padding included, over tokens present
FEW_TOKENS = 256  # in a batch of so few, calls of kernels cost more than padding
GROUP_COST_TOKENS = 32  # what a group costs beside its tokens: calls of kernels, and all weights read once more


def group_by_length(lengths: Lengths) -> list[Lengths]:
    """Find the groups with the least cost: tokens computed, and a price for each group.

    Where that computes more than `MAX_COMPUTED`, and there are more than `FEW_TOKENS`, the price is lowered. The groups
    depend on nothing but the lengths, so all stages compute a batch in the same ones.

    Args:
        lengths: tokens of each sequence, all 1 or more.

    Returns:
        Numbers of the sequences of each group, ascending; the groups in order of length.
    """
    if not len(lengths):
        return []
    sizes, counts = np.unique(lengths, return_counts=True)
    price, num_tokens = float(GROUP_COST_TOKENS), int(lengths.sum())
    allowed = MAX_COMPUTED * num_tokens if num_tokens > FEW_TOKENS else math.inf
    stops = _cheapest_cuts(sizes, counts, price)
    while _tokens(sizes, counts, stops) > allowed:
        price *= 3 / 4
        stops = _cheapest_cuts(sizes, counts, price)
    order = np.argsort(lengths, kind="stable")
    ends = np.cumsum(counts)[np.array(stops) - 1]
    groups = []
    for start, end in pairwise([0, *ends]):
        num_parts = -(-(end - start) // max(1, MAX_TOKENS // lengths[order[end - 1]]))
        groups += [np.sort(part) for part in np.array_split(order[start:end], num_parts)]
    return groups


def count_computed(lengths: Lengths) -> int:
    """Count the tokens that are computed for sequences of these lengths, padding included."""
    return sum(len(group) * int(lengths[group].max()) for group in group_by_length(lengths))


def _cheapest_cuts(sizes: Lengths, counts: Lengths, price: float) -> list[int]:
    """Cut different lengths, ascending, into ranges; where each ends. Dynamic programming over where the last begins.

    Args:
        sizes: the lengths.
        counts: sequences of each.
        price: cost of a range beside its tokens.
    """
    before = np.concatenate([[0], np.cumsum(counts)])
    costs, starts = np.zeros(len(sizes) + 1), np.zeros(len(sizes) + 1, np.int64)
    for stop in range(1, len(sizes) + 1):
        choices = costs[:stop] + (before[stop] - before[:stop]) * sizes[stop - 1]
        starts[stop] = choices.argmin()
        costs[stop] = choices[starts[stop]] + price
    stops = [len(sizes)]
    while starts[stops[-1]] > 0:
        stops.append(int(starts[stops[-1]]))
    return stops[::-1]


def _tokens(sizes: Lengths, counts: Lengths, stops: list[int]) -> int:
    """Count the tokens of ranges, padding included."""
    return sum(int(counts[start:stop].sum() * sizes[stop - 1]) for start, stop in pairwise([0, *stops]))
