"""Feasibility of a throughput: the bound decides most rates, label setting the others. NumPy."""

import numpy as np

from shards.planning.solver.dual_prices import DualSolution, improve_prices
from shards.planning.solver.label_setting import Steps, best_within
from shards.planning.solver.resources import TIE, Floats, Ints, Resources

PRICE_ROUNDS = 12


def parts_at(steps: Steps, resources: Resources, rate: float) -> Floats:
    """Compute what each step uses at a throughput.

    Args:
        steps: the steps, E.
        resources: the resources of the problem, R.
        rate: items per second.

    Returns:
        (R, E), fractions of the capacities; infinite where a step alone exceeds one.
    """
    uses = resources.parts(steps.stages, rate)
    return np.where(np.any(uses > 1 + TIE, axis=0), np.inf, uses)


def path_at(steps: Steps, resources: Resources, rate: float, prices: Floats) -> Ints | None:
    """Find a path that keeps within the capacities at a throughput; None where there is none.

    Args:
        steps: the steps.
        resources: the resources of the problem.
        rate: items per second.
        prices: (R,), to begin with.
    """
    uses = parts_at(steps, resources, rate)
    solution = _improve(steps, uses, prices, stop_when_decided=True)
    if solution.is_proof:
        return None
    if solution.fits:
        return solution.path
    left, numbers = narrowed(steps, uses, solution.prices)
    none = np.zeros(len(numbers))
    path = best_within(left, with_total_price(uses[:, numbers], solution.prices), none.astype(np.int64), none)
    return None if path is None else numbers[path]


def better_prices(steps: Steps, resources: Resources, rate: float, prices: Floats) -> Floats:
    """Improve prices at a feasible throughput, so that the bound excludes more steps.

    Args:
        steps: the steps.
        resources: the resources of the problem.
        rate: items per second.
        prices: (R,), to begin with.
    """
    return _improve(steps, parts_at(steps, resources, rate), prices, stop_when_decided=False).prices


def narrowed(steps: Steps, uses: Floats, prices: Floats) -> tuple[Steps, Ints]:
    """Keep the steps that lie on a path of cost at most 1; no feasible path has any other.

    Args:
        steps: the steps, E.
        uses: (R, E), as `parts_at` gives them.
        prices: (R,).

    Returns:
        The steps that stay, and their numbers.
    """
    numbers = np.flatnonzero(steps.within(prices @ uses, 1 + TIE))
    return Steps(steps.stages.take(numbers), steps.num_cuts, steps.num_stages), numbers


def with_total_price(uses: Floats, prices: Floats) -> Floats:
    """Append the cost of each step as one more resource, (R + 1, E), by which hopeless labels are dropped earlier."""
    return np.vstack([uses, prices @ uses])


def _improve(steps: Steps, uses: Floats, prices: Floats, *, stop_when_decided: bool) -> DualSolution:
    def cheapest_at(prices: Floats) -> DualSolution:
        bound, path = steps.cheapest(prices @ uses)
        used = uses[:, path].sum(axis=1) if len(path) else np.full(len(prices), np.inf)
        return DualSolution(prices, path, bound, used)

    return improve_prices(cheapest_at, prices, PRICE_ROUNDS, stop_when_decided=stop_when_decided)
