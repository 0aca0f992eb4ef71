"""Bounds over whole grids: a million stages at once, without listing them.

`label_setting.Steps` has the same recursion for lists of stages; on a grid, ranges of the two towers stay separate, and
the minimum over all stages from one cut is a minimum over rows, then columns.

Legend: `V` ranges of vision layers, `T` ranges of text layers, `A` vision cuts, `B` text cuts, `R` resources.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shards.planning.solver.capacities import TIE, Floats, Ints, Resources, Stages
from shards.planning.solver.feasibility import DualSolution
from shards.planning.solver.grid import Grid, row_blocks
from shards.planning.solver.label_setting import Steps


@dataclass(frozen=True)
class GridAt:
    """All stages at one throughput (`rate`, items per second), for paths of `num_stages` stages."""

    grid: Grid
    resources: Resources
    rate: float
    num_stages: int

    @cached_property
    def parts(self) -> list[dict[int, Floats]]:
        """Uses of the stages on each pool, by resource: (V, T), as fractions of the capacities."""
        grid, caps = self.grid, self.resources.capacities(np.array([self.rate]))[:, 0]
        shape = grid.costs[0].seconds.shape
        found: list[dict[int, Floats]] = [{} for _ in grid.costs]
        for rows in row_blocks(*shape):
            for index, costs in enumerate(grid.costs):
                for resource, use in self.resources.uses(index, self.rate, costs.take(rows)):
                    parts = use / caps[resource] if caps[resource] > 0 else np.where(use > 0, np.inf, 0.0)
                    found[index].setdefault(resource, np.empty(shape))[rows] = parts
        return found

    def stage_prices(self, prices: Floats) -> list[Floats]:
        """Return the costs of the stages on each pool, (V, T), at prices (R,)."""
        return [sum(prices[resource] * part for resource, part in parts.items()) for parts in self.parts]

    def cheapest(self, prices: Floats) -> DualSolution:
        """Find the cheapest path at prices (R,)."""
        by_pool = self.stage_prices(prices)
        price = np.minimum.reduce(by_pool)
        to_go = self._to_go(price)
        bound = float(to_go[-1][0, 0])
        if not np.isfinite(bound):
            return DualSolution(prices, np.empty(0, dtype=np.int64), bound, np.full(len(prices), np.inf))
        used, cut = np.zeros(len(prices)), (0, 0)
        for after in reversed(to_go[:-1]):
            row, column = self._first_step(price, after, cut)
            pool = int(np.argmin([values[row, column] for values in by_pool]))
            for resource, part in self.parts[pool].items():
                used[resource] += part[row, column]
            cut = int(self.grid.vision.stops[row]), int(self.grid.text.stops[column])
        return DualSolution(prices, np.empty(0, dtype=np.int64), bound, used)

    def open_steps(self, prices: Floats) -> Steps:
        """List the stages that lie on a path of cost at most 1; no feasible path has any other."""
        grid, by_pool = self.grid, self.stage_prices(prices)
        around = self._around(np.minimum.reduce(by_pool))
        parts = [grid.stages(index, price + around <= 1 + TIE) for index, price in enumerate(by_pool)]
        stages = Stages(
            *(np.concatenate(column) for column in zip(*(vars(part).values() for part in parts), strict=True))
        )
        stages = stages.take(np.argsort(stages.start, kind="stable"))
        return Steps(stages, (grid.vision.depth + 1) * (grid.text.depth + 1), self.num_stages)

    def _first_step(self, price: Floats, after: Floats, cut: tuple[int, int]) -> tuple[int, int]:
        """Find the row and column of the stage of the cheapest path that starts at a cut."""
        vision, text = self.grid.vision, self.grid.text
        rows, columns = np.flatnonzero(vision.starts == cut[0]), np.flatnonzero(text.starts == cut[1])
        costs = price[np.ix_(rows, columns)] + after[np.ix_(vision.stops[rows], text.stops[columns])]
        row, column = np.unravel_index(np.argmin(costs), costs.shape)
        return int(rows[row]), int(columns[column])

    def _to_go(self, price: Floats) -> list[Floats]:
        """Return the least cost from each cut to the end, (A, B), for 0 to `num_stages` stages left."""
        vision, text = self.grid.vision, self.grid.text
        found = [self._at_corner(-1)]
        for _ in range(self.num_stages):
            found.append(_least(price, found[-1], (vision.stops, text.stops), (vision.starts, text.starts)))
        return found

    def _so_far(self, price: Floats) -> list[Floats]:
        """Return the least cost from the first cut to each, (A, B), for 0 to `num_stages` - 1 stages done."""
        vision, text = self.grid.vision, self.grid.text
        rows, columns = np.argsort(vision.stops, kind="stable"), np.argsort(text.stops, kind="stable")
        price = price[np.ix_(rows, columns)]
        starts, stops = (vision.starts[rows], text.starts[columns]), (vision.stops[rows], text.stops[columns])
        found = [self._at_corner(0)]
        for _ in range(self.num_stages - 1):
            found.append(_least(price, found[-1], starts, stops))
        return found

    def _at_corner(self, corner: int) -> Floats:
        costs = np.full((self.grid.vision.depth + 1, self.grid.text.depth + 1), np.inf)
        costs[corner, corner] = 0.0
        return costs

    def _around(self, price: Floats) -> Floats:
        """Return the least cost of the other stages of a path through each stage, (V, T)."""
        vision, text = self.grid.vision, self.grid.text
        around = np.full(price.shape, np.inf)
        for before, after in zip(self._so_far(price), self._to_go(price)[-2::-1], strict=True):
            both = before.take(vision.starts, axis=0).take(text.starts, axis=1)
            both += after.take(vision.stops, axis=0).take(text.stops, axis=1)
            np.minimum(around, both, out=around)
        return around


def _least(price: Floats, costs: Floats, ends: tuple[Ints, Ints], groups: tuple[Ints, Ints]) -> Floats:
    """Extend least costs (A, B) by one stage of `price` (V, T); infinite where no stage ends.

    `ends` (V,) and (T,) are the cuts at the end of the stage where `costs` apply; `groups` (V,) and (T,), ascending,
    those at its other end, by which the result is ordered.
    """
    least = np.full(costs.shape, np.inf)
    reached = np.isfinite(costs)
    rows, columns = (
        np.flatnonzero(np.logical_or.reduce(reached, axis=axis)[cuts]) for axis, cuts in zip((1, 0), ends, strict=True)
    )
    if len(rows) == 0 or len(columns) == 0:
        return least
    values = costs.take(ends[0][rows], axis=0).take(ends[1][columns], axis=1)
    values += price if values.shape == price.shape else price[np.ix_(rows, columns)]
    (row_cuts, first_rows), (column_cuts, first_columns) = (
        np.unique(cuts[which], return_index=True) for cuts, which in zip(groups, (rows, columns), strict=True)
    )
    least[np.ix_(row_cuts, column_cuts)] = np.minimum.reduceat(
        np.minimum.reduceat(values, first_rows, axis=0), first_columns, axis=1
    )
    return least
