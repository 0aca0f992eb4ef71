"""Is a throughput possible? The bound answers most questions, labels the rest. NumPy."""

import numpy as np

from shards.planning.dual_prices import DualSolution, best_offer
from shards.planning.label_setting import Steps, best_within
from shards.planning.resources import TIE, Floats, Ints, Resources

PRICE_ROUNDS = 12


def parts_at(steps: Steps, resources: Resources, rate: float) -> Floats:
    """(R, E) what each step uses, as parts of what there is; infinite where it takes more than all of something."""
    uses = resources.parts(steps.stages, rate)
    return np.where(np.any(uses > 1 + TIE, axis=0), np.inf, uses)


def path_at(steps: Steps, resources: Resources, rate: float, prices: Floats) -> Ints | None:
    """A path that keeps within what there is at so many items a second; None where there is none."""
    uses = parts_at(steps, resources, rate)
    offer = _best_offer(steps, uses, prices, settled=True)
    if offer.is_proof:
        return None
    if offer.fits:
        return offer.path
    left, numbers = narrowed(steps, uses, offer.prices)
    none = np.zeros(len(numbers))
    path = best_within(left, priced(uses[:, numbers], offer.prices), none.astype(np.int64), none)
    return None if path is None else numbers[path]


def better_prices(steps: Steps, resources: Resources, rate: float, prices: Floats) -> Floats:
    """Prices that say earlier what won't fit."""
    return _best_offer(steps, parts_at(steps, resources, rate), prices, settled=False).prices


def narrowed(steps: Steps, uses: Floats, prices: Floats) -> tuple[Steps, Ints]:
    """The steps that lie on a path which costs no more than all there is, and their numbers."""
    numbers = np.flatnonzero(steps.within(prices @ uses, 1 + TIE))
    return Steps(steps.stages.take(numbers), steps.num_cuts, steps.num_stages), numbers


def priced(uses: Floats, prices: Floats) -> Floats:
    """One resource more: what all of them cost together. It says early who won't fit."""
    return np.vstack([uses, prices @ uses])


def _best_offer(steps: Steps, uses: Floats, prices: Floats, *, settled: bool) -> DualSolution:
    def offer_at(prices: Floats) -> DualSolution:
        bound, path = steps.cheapest(prices @ uses)
        used = uses[:, path].sum(axis=1) if len(path) else np.full(len(prices), np.inf)
        return DualSolution(prices, path, bound, used)

    return best_offer(offer_at, prices, PRICE_ROUNDS, settled=settled)
