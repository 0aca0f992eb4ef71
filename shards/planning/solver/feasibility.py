"""Feasibility of a throughput: a bound by prices decides most rates, label setting the others.

At any prices that sum to 1 for all capacities together, a path within every capacity costs at most 1. So the cheapest
path proves that there is none, or fits itself, or shows which prices to raise.

Source: Lagrangian bounds for shortest paths with resource constraints (Handler and Zang 1980).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shards.planning.solver.capacities import TIE, Floats, Ints, Resources
from shards.planning.solver.label_setting import Steps, best_within

PRICE_ROUNDS = 12
FIRST_PRICE_STEP = 1.0
LEAST_PRICE = 1e-9  # never 0: an infinite use must have an infinite cost
CLOSE = 1e-3  # a bound this near to 1 is good enough


@dataclass(frozen=True)
class DualSolution:
    """Prices and the cheapest path at them; an infinite bound if there is no path.

    `prices` (R,) are of whole capacities and sum to 1; `path` has numbers of steps, empty for none or if computed on a
    grid; `bound` is its cost, `used` (R,) its uses as fractions of the capacities.
    """

    prices: Floats
    path: Ints
    bound: float
    used: Floats

    @property
    def fits(self) -> bool:
        """Whether the path keeps within the capacities."""
        return bool(np.all(self.used <= 1 + TIE))

    @property
    def is_proof(self) -> bool:
        """Whether the bound proves that no path keeps within the capacities."""
        return self.bound > 1 + TIE


def improve_prices(
    cheapest_at: Callable[[Floats], DualSolution], prices: Floats, num_rounds: int, *, stop_when_decided: bool
) -> DualSolution:
    """Raise the bound by raising the price of what the cheapest path overuses, from initial prices (R,).

    With `stop_when_decided`, stop as soon as a path fits, or the bound proves that none does.
    """
    best, size = cheapest_at(prices), FIRST_PRICE_STEP
    for _ in range(num_rounds):
        if not np.isfinite(best.bound) or (best.is_proof or best.fits if stop_when_decided else best.bound > 1 - CLOSE):
            break
        raised = best.prices * np.exp(size * np.clip(best.used - best.bound, -1, 1)) + LEAST_PRICE
        found = cheapest_at(raised / raised.sum())
        if found.bound > best.bound or (stop_when_decided and found.fits):
            best, size = found, size * 2
        else:
            size /= 2
    return best


def path_at(steps: Steps, resources: Resources, rate: float, prices: Floats) -> Ints | None:
    """Find a path within the capacities at a throughput, from initial prices (R,); None if there is none."""
    uses = resources.parts(steps.stages, rate)
    solution = _improve(steps, uses, prices, stop_when_decided=True)
    if solution.is_proof:
        return None
    if solution.fits:
        return solution.path
    left, numbers = narrow_steps(steps, uses, solution.prices)
    none = np.zeros(len(numbers))
    path = best_within(left, uses[:, numbers], solution.prices, none.astype(np.int64), none)
    return None if path is None else numbers[path]


def narrow_at(steps: Steps, resources: Resources, rate: float, prices: Floats) -> tuple[Steps, Floats]:
    """Improve prices (R,) at a feasible throughput, and drop the steps that they exclude."""
    uses = resources.parts(steps.stages, rate)
    prices = _improve(steps, uses, prices, stop_when_decided=False).prices
    return narrow_steps(steps, uses, prices)[0], prices


def narrow_steps(steps: Steps, uses: Floats, prices: Floats) -> tuple[Steps, Ints]:
    """Keep the steps, E, that lie on a path of cost at most 1, as no feasible path has any other; also their numbers.

    `uses` is (R, E), as `Resources.parts` returns them; `prices` is (R,).
    """
    numbers = np.flatnonzero(steps.within(prices @ uses, 1 + TIE))
    return Steps(steps.stages.take(numbers), steps.num_cuts, steps.num_stages), numbers


def _improve(steps: Steps, uses: Floats, prices: Floats, *, stop_when_decided: bool) -> DualSolution:
    def cheapest_at(prices: Floats) -> DualSolution:
        bound, path = steps.cheapest(prices @ uses)
        used = uses[:, path].sum(axis=1) if len(path) else np.full(len(prices), np.inf)
        return DualSolution(prices, path, bound, used)

    return improve_prices(cheapest_at, prices, PRICE_ROUNDS, stop_when_decided=stop_when_decided)
