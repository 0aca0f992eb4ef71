"""Prices on the resources, and the bound that they give. NumPy.

With any prices that add up to 1 for all there is, a path whose uses stay within every resource costs at most 1. So the
cheapest path proves that there is none, or fits itself, or shows which prices to raise.

Source: Lagrangian bounds for shortest paths with resource constraints (Handler and Zang 1980).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shards.planning.resources import TIE, Floats, Ints

FIRST_PRICE_STEP = 1.0
LEAST_PRICE = 1e-9  # never 0: an infinite use has to cost infinitely much
CLOSE = 1e-3  # a bound so near to 1 is as good as any


@dataclass(frozen=True)
class DualSolution:
    """Prices, the cheapest path at them, what it costs and what it uses; no path costs infinitely much.

    Attributes:
        prices: (R,) of all there is of each resource; they add up to 1.
        path: numbers of its steps; empty where there is none, or nobody asked.
        bound: what it costs.
        used: (R,) what it uses, as parts of what there is.
    """

    prices: Floats
    path: Ints
    bound: float
    used: Floats

    @property
    def fits(self) -> bool:
        """Whether the path keeps within what there is."""
        return bool(np.all(self.used <= 1 + TIE))

    @property
    def is_proof(self) -> bool:
        """Whether no path does."""
        return self.bound > 1 + TIE


def best_offer(
    offer_at: Callable[[Floats], DualSolution], prices: Floats, num_rounds: int, *, settled: bool
) -> DualSolution:
    """Raise the bound: what the cheapest path uses too much becomes dearer.

    Args:
        offer_at: finds the cheapest path at prices.
        prices: to begin with.
        num_rounds: how often prices are changed.
        settled: stop as soon as there is a path that fits, or a proof that there is none.
    """
    best, size = offer_at(prices), FIRST_PRICE_STEP
    for _ in range(num_rounds):
        if not np.isfinite(best.bound) or (best.is_proof or best.fits if settled else best.bound > 1 - CLOSE):
            break
        raised = best.prices * np.exp(size * np.clip(best.used - best.bound, -1, 1)) + LEAST_PRICE
        found = offer_at(raised / raised.sum())
        if found.bound > best.bound or (settled and found.fits):
            best, size = found, size * 2
        else:
            size /= 2
    return best
