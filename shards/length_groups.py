"""Groups of sequences of similar length, each computed in one rectangle of its longest one's width.

Pure, and without torch: stages compute by these groups, the decode step and the planner count by them.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Lengths = NDArray[np.int64]


@dataclass(frozen=True)
class GroupCosts:
    """What decides on groups, by the device that computes them.

    Attributes:
        price_tokens: what a group costs beside its tokens, in tokens: calls of kernels, and all weights read once more.
        max_tokens: of one group; what layers hold at once grows with it.
        max_computed: tokens computed, padding included, over tokens present.
        few_tokens: in a batch of so few, `max_computed` doesn't count.
    """

    price_tokens: float
    max_tokens: int
    max_computed: float
    few_tokens: int


# Measured on two cores: beyond the caches, layers are slower, and a call of a kernel is cheap.
CPU_GROUPS = GroupCosts(price_tokens=32, max_tokens=4096, max_computed=1.1, few_tokens=256)

GPU_LAUNCH_S = 30e-6
"""Seconds of the interpreter for an operation with a kernel, its module included; measured with an H100's host."""
LAUNCHES_PER_LAYER = 15
MAX_GPU_TOKENS = 1 << 17


def gpu_groups(layer_flops_per_token: float, device_flops: float) -> GroupCosts:
    """Find what decides on groups on a GPU: in the time of launching one more group, so many tokens are computed."""
    price_tokens = LAUNCHES_PER_LAYER * GPU_LAUNCH_S * device_flops / layer_flops_per_token
    return GroupCosts(price_tokens, max_tokens=MAX_GPU_TOKENS, max_computed=math.inf, few_tokens=0)


def group_by_length(lengths: Lengths, costs: GroupCosts = CPU_GROUPS) -> list[Lengths]:
    """Find the groups with the least cost: tokens computed, and a price for each group.

    Where that computes more than `max_computed`, and there are more than `few_tokens`, the price is lowered. The groups
    depend on nothing but the lengths and these costs, so all stages of a run compute a batch in the same ones.

    Args:
        lengths: tokens of each sequence, all 1 or more.
        costs: of the device that computes them.

    Returns:
        Numbers of the sequences of each group, ascending; the groups in order of length.
    """
    if not len(lengths):
        return []
    sizes, counts = np.unique(lengths, return_counts=True)
    price, num_tokens = float(costs.price_tokens), int(lengths.sum())
    allowed = costs.max_computed * num_tokens if num_tokens > costs.few_tokens else math.inf
    stops = _cheapest_cuts(sizes, counts, price)
    while _tokens(sizes, counts, stops) > allowed:
        price *= 3 / 4
        stops = _cheapest_cuts(sizes, counts, price)
    order = np.argsort(lengths, kind="stable")
    ends = np.cumsum(counts)[np.array(stops) - 1]
    groups = []
    for start, end in pairwise([0, *ends]):
        num_parts = -(-(end - start) // max(1, costs.max_tokens // lengths[order[end - 1]]))
        groups += [np.sort(part) for part in np.array_split(order[start:end], num_parts)]
    return groups


def count_computed(lengths: Lengths, costs: GroupCosts = CPU_GROUPS) -> int:
    """Count the tokens that are computed for sequences of these lengths, padding included."""
    return sum(len(group) * int(lengths[group].max()) for group in group_by_length(lengths, costs))


def _cheapest_cuts(sizes: Lengths, counts: Lengths, price: float) -> list[int]:
    """Cut different lengths, ascending, into ranges; where each ends. Dynamic programming over the last's begin."""
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
