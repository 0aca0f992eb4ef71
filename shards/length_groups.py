"""Groups of sequences of similar length, each computed in a rectangle as wide as its longest. Without torch.

Stages compute by these groups; the decode step and the planner count by them.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from shards.planning.devices import GROUP_LAUNCH_S

Lengths = NDArray[np.int64]


@dataclass(frozen=True)
class GroupCosts:
    """What decides on groups, by the device that computes them.

    A group costs `price_tokens` besides its tokens: kernel calls, reading all weights again. Memory limits
    `max_tokens`. `max_computed` (tokens with padding over tokens) doesn't apply to batches of at most `few_tokens`.
    """

    price_tokens: float
    max_tokens: int
    max_computed: float
    few_tokens: int


# Measured on two cores: layers are slower beyond the caches, and a kernel call is cheap.
CPU_GROUPS = GroupCosts(price_tokens=32, max_tokens=4096, max_computed=1.1, few_tokens=256)

MAX_GPU_TOKENS = 1 << 17


def gpu_groups(layer_flops_per_token: float, kernels_per_layer: int, device_flops: float) -> GroupCosts:
    """Compute the group costs of a GPU: launching one more group takes the time of computing so many tokens."""
    price_tokens = kernels_per_layer * GROUP_LAUNCH_S * device_flops / layer_flops_per_token
    return GroupCosts(price_tokens, max_tokens=MAX_GPU_TOKENS, max_computed=math.inf, few_tokens=0)


def group_by_length(lengths: Lengths, costs: GroupCosts = CPU_GROUPS) -> list[Lengths]:
    """Find the groups with the least cost: tokens computed, and a price for each group.

    If that computes more than `max_computed`, and there are more than `few_tokens`, the price is lowered. Groups depend
    only on lengths (at least 1) and costs, so all stages of a run form the same ones. Returns the sequence numbers of
    each group, ascending; groups are in order of length.
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
    """Count the tokens that are computed for sequences of these lengths, including padding."""
    return sum(len(group) * int(lengths[group].max()) for group in group_by_length(lengths, costs))


def _cheapest_cuts(sizes: Lengths, counts: Lengths, price: float) -> list[int]:
    """Cut ascending lengths into ranges; returns their ends. Dynamic programming over the last range's start."""
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
    return sum(int(counts[start:stop].sum() * sizes[stop - 1]) for start, stop in pairwise([0, *stops]))
