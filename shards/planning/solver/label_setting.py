"""Paths of stages from the first layer to the last: the cheapest, and the preferred one within capacities.

Cuts are numbered; a stage leads from one cut to a later one, so a plan of n stages is a path of n steps.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shards.planning.solver.capacities import TIE, Floats, Ints, Stages

FAR = 1 << 62  # no path
NUM_NEIGHBOURS = 16
SLACK = 1e-12  # rounding error of sums of the same numbers in another order


@dataclass(frozen=True)
class Steps:
    """Stages sorted by their start, as steps of paths from cut 0 to the last; `num_cuts` counts unreached cuts, too."""

    stages: Stages
    num_cuts: int
    num_stages: int

    def to_go(self, cost: Floats) -> Floats:
        """Return the least cost from each cut to the end, by the number of steps left: (num_stages + 1, num_cuts)."""
        return self._least(cost, -1, self.stages.stop, self.stages.start)

    def so_far(self, cost: Floats) -> Floats:
        """Return the least cost from the first cut to each, by the number of steps done: (num_stages + 1, num_cuts)."""
        return self._least(cost, 0, self.stages.start, self.stages.stop)

    def cheapest(self, cost: Floats) -> tuple[float, Ints]:
        """Find the cheapest path's cost and the numbers of its steps; infinite and empty if there is none."""
        to_go = self.to_go(cost)
        if not np.isfinite(to_go[-1, 0]):
            return np.inf, np.empty(0, dtype=np.int64)
        path, cut = [], 0
        for num_left in reversed(range(self.num_stages)):
            here = self._steps_from(cut)
            best = here[int(np.argmin(cost[here] + to_go[num_left][self.stages.stop[here]]))]
            path.append(best)
            cut = int(self.stages.stop[best])
        return float(to_go[-1, 0]), np.array(path)

    def find_preferred(self, rank: Ints, unevenness: Floats) -> Ints | None:
        """Find the path of the lowest rank, then unevenness, ignoring capacities; None if there is none."""
        ranks = np.full((self.num_stages + 1, self.num_cuts), FAR)
        squares = np.full(ranks.shape, np.inf)
        ranks[0, -1], squares[0, -1] = 0, 0.0
        choice = np.full(ranks.shape, -1)
        for num_left in range(1, self.num_stages + 1):
            through = rank + np.minimum(ranks[num_left - 1][self.stages.stop], FAR - rank)
            np.minimum.at(ranks[num_left], self.stages.start, through)
            tied = np.flatnonzero((through == ranks[num_left][self.stages.start]) & (through < FAR))
            uneven = unevenness[tied] + squares[num_left - 1][self.stages.stop[tied]]
            np.minimum.at(squares[num_left], self.stages.start[tied], uneven)
            chosen = tied[uneven == squares[num_left][self.stages.start[tied]]]
            choice[num_left, self.stages.start[chosen]] = chosen
        path, cut = [], 0
        for num_left in range(self.num_stages, 0, -1):
            if choice[num_left, cut] < 0:
                return None
            path.append(choice[num_left, cut])
            cut = int(self.stages.stop[path[-1]])
        return np.array(path)

    def within(self, cost: Floats, limit: float) -> NDArray[np.bool_]:
        """Whether each step lies on a path that costs at most the limit, (E,)."""
        to_go, so_far = self.to_go(cost), self.so_far(cost)
        least = np.full(len(self.stages), np.inf)
        for num_done in range(self.num_stages):
            through = so_far[num_done][self.stages.start] + to_go[self.num_stages - num_done - 1][self.stages.stop]
            np.minimum(least, through, out=least)
        return least + cost <= limit

    def _least(self, cost: Floats, corner: int, near: Ints, far: Ints) -> Floats:
        """Return the least cost between a corner and each cut; steps have an end near the corner and a far one."""
        found = np.full((self.num_stages + 1, self.num_cuts), np.inf)
        found[0, corner] = 0.0
        for number in range(1, self.num_stages + 1):
            np.minimum.at(found[number], far, cost + found[number - 1][near])
        return found

    def _steps_from(self, cut: int) -> Ints:
        first, last = np.searchsorted(self.stages.start, [cut, cut + 1])
        return np.arange(first, last)


@dataclass(frozen=True)
class Labels:
    """Beginnings of paths, N of the same number of steps; `parent` is the label of one step less, `step` the last step.

    Each has reached a `cut`, with `used` (N, R) as fractions of the capacities. An integer `rank` is minimised first,
    then `unevenness`.
    """

    cut: Ints
    used: Floats
    rank: Ints
    unevenness: Floats
    parent: Ints
    step: Ints

    def take(self, which: Ints) -> "Labels":
        """Select labels by their numbers."""
        return Labels(*(values[which] for values in vars(self).values()))


def best_within(steps: Steps, uses: Floats, prices: Floats, rank: Ints, unevenness: Floats) -> Ints | None:
    """Find the path of the lowest rank, then unevenness, within all capacities; None if there is none.

    The result is exact: all labels at the same cut are kept unless another dominates them in everything. `uses` (R, E)
    are fractions of capacities; cost at `prices` (R,) counts as one more resource, to drop hopeless labels earlier;
    `rank` (E,) (integers) and `unevenness` (E,) add up along a path.

    Source: the label-setting method for shortest paths with resource constraints (Desrochers and Soumis 1988).
    """
    uses = np.vstack([uses, prices @ uses])
    uses = uses[np.any(uses > 0, axis=1)]
    to_go = np.stack([steps.to_go(use) for use in uses], axis=-1)  # (S + 1, cuts, R)
    first = np.searchsorted(steps.stages.start, np.arange(steps.num_cuts + 1))
    zero = np.zeros(1, dtype=np.int64)
    labels = Labels(zero, np.zeros((1, len(uses))), zero, np.zeros(1), zero, zero)
    history = [labels]
    for num_left in reversed(range(steps.num_stages)):
        labels = _extend(labels, steps.stages, first, uses, rank, unevenness, 1 + TIE - to_go[num_left])
        labels = labels.take(_drop_dominated(labels))
        history.append(labels)
    if not len(labels.cut):
        return None
    best = int(np.lexsort((labels.unevenness, labels.rank))[0])
    path = []
    for labels in reversed(history[1:]):
        path.append(labels.step[best])
        best = int(labels.parent[best])
    return np.array(path[::-1])


def _extend(
    labels: Labels, stages: Stages, first: Ints, uses: Floats, rank: Ints, unevenness: Floats, room: Floats
) -> Labels:
    """Extend every label by every step from its cut, except those that leave too little for the rest.

    `first` (cuts + 1,) has the number of the first step from each cut, `room` (cuts, R) the most that may be used up at
    each cut; `uses`, `rank` and `unevenness` are as in `best_within`.
    """
    num_steps = first[labels.cut + 1] - first[labels.cut]
    parent = np.repeat(np.arange(len(labels.cut)), num_steps)
    offset = np.arange(len(parent)) - np.repeat(np.cumsum(num_steps) - num_steps, num_steps)
    step = first[labels.cut[parent]] + offset
    used = labels.used[parent] + uses[:, step].T
    fits = np.all(used <= room[stages.stop[step]], axis=1)
    parent, step, used = parent[fits], step[fits], used[fits]
    return Labels(
        cut=stages.stop[step],
        used=used,
        rank=labels.rank[parent] + rank[step],
        unevenness=labels.unevenness[parent] + unevenness[step],
        parent=parent,
        step=step,
    )


def _drop_dominated(labels: Labels) -> Ints:
    """Drop labels that a neighbour in sorted order, at the same cut, equals or beats in everything.

    Some that stay are dominated by more distant labels; that costs time, but never the best path.
    """
    order = np.lexsort((labels.used[:, -1], labels.unevenness, labels.rank, labels.cut))
    cut, used = labels.cut[order], labels.used[order]
    dominated = np.zeros(len(order), dtype=bool)
    for distance in range(1, min(NUM_NEIGHBOURS, len(order) - 1) + 1):
        same_cut = cut[distance:] == cut[:-distance]
        dominated[distance:] |= same_cut & np.all(used[:-distance] <= used[distance:] + SLACK, axis=1)
    return order[~dominated]
