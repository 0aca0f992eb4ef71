"""Uses of stages at a throughput, and capacities: devices, core-seconds, the host's memory.

The uses of a plan's stages add up, resource by resource, and grow with the throughput. That makes the search exact: a
throughput is feasible if some cut and placement keep every sum within its capacity.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from shards.planning.problem import PlacementProblem, Pool

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Index = Ints | NDArray[np.bool_] | slice | tuple[Ints, Ints]

# Sums of the same costs in another order differ in the last digits; sums this close count as equal.
TIE = 1e-9

RATES_AT_ONCE, NUM_ROUNDS = 31, 10  # each round leaves one 32nd, down to the precision of a float


@dataclass(frozen=True)
class StageCosts:
    """Costs of stages, in arrays of one shape.

    Seconds are per item, in one replica and (`cpu_seconds`) on the host's cores; `memory` is bytes of one replica;
    `smallest` is the smallest part of a device that a replica may take, a power of two up to 1.
    """

    seconds: Floats
    cpu_seconds: Floats
    memory: Floats
    smallest: Floats

    def take(self, which: Index) -> Self:
        """Select stages as NumPy does: by number, mask or slice."""
        return type(self)(*(values[which] for values in vars(self).values()))


@dataclass(frozen=True)
class Stages(StageCosts):
    """Stages with the numbers of the cuts before and after them, and of their pools, (E,)."""

    start: Ints
    stop: Ints
    pool: Ints

    def __len__(self) -> int:
        return len(self.start)


def smallest_part(memory: Floats, pool: Pool) -> Floats:
    """Compute the smallest power-of-two part of a device whose share of the memory holds a replica; (E,)."""
    part = np.ones_like(memory)
    num_shares = 2
    while num_shares <= pool.max_shares:  # few: faster than logarithms
        part[memory * num_shares <= pool.device.memory_bytes] = 1 / num_shares
        num_shares *= 2
    return part


def devices_for(load: Floats, smallest: Floats) -> Floats:
    """Compute the devices for a load in seconds of work per second: whole ones, or a power-of-two part of one.

    `smallest` is the smallest part that a replica may take.
    """
    load = load * (1 - TIE)
    mantissa, exponent = np.frexp(load)
    part = np.ldexp(1.0, exponent - (mantissa == 0.5))
    return np.where(load > 1, np.ceil(load), np.maximum(part, smallest))


def replicas_for(load: Floats) -> Floats:
    """Compute the fewest replicas that do `load` seconds of work per second."""
    return np.ceil(load * (1 - TIE))


@dataclass(frozen=True)
class Resources:
    """Resources of a problem, in order: devices (or own cores) of each pool; all cores; memory of each shared pool.

    Some may be used by no stage.
    """

    problem: PlacementProblem

    @property
    def num(self) -> int:
        """Number of resources, used or not."""
        return self.cores + 1 + max(1, len(self.memory))

    @property
    def cores(self) -> int:
        """Number of the resource that is all cores together."""
        return len(self.problem.pools)

    @cached_property
    def memory(self) -> dict[int, int]:
        """Number of the resource that is the memory of each shared pool, by the pool's number."""
        shared = [index for index, pool in enumerate(self.problem.pools) if pool.shared]
        return {index: self.cores + 1 + order for order, index in enumerate(shared)}

    def max_rate(self, num_stages: int) -> float:
        """Return the items per second at which the host's own work fills the shared cores, or calls Ray's driver."""
        problem, driver_rate = self.problem, self.problem.driver_rate(num_stages)
        if problem.num_cores is None or problem.host_seconds == 0:
            return driver_rate
        return min(problem.num_cores / problem.host_seconds, driver_rate)

    def capacities(self, rates: Floats) -> Floats:
        """Compute capacities for the stages at P rates, minus the host's own work; (R, P), may be infinite."""
        problem = self.problem
        caps = np.full((self.num, len(rates)), np.inf)
        for index, pool in enumerate(problem.pools):
            if pool.has_own_cores or not pool.shared:
                caps[index] = pool.num
        if problem.num_cores is not None:
            caps[self.cores] = np.maximum(problem.num_cores - rates * problem.host_seconds, 0.0)
        for index, resource in self.memory.items():
            caps[resource] = problem.pools[index].memory_bytes or np.inf
        return caps

    def uses(self, pool_index: int, rate: float | Floats, costs: StageCosts) -> Iterator[tuple[int, Floats]]:
        """Yield the number and amount of each resource that stages on one pool use; `rate` may be an array."""
        pool = self.problem.pools[pool_index]
        cores = rate * costs.cpu_seconds
        if self.problem.num_cores is not None:
            yield self.cores, cores if pool.core_speed is None else cores * pool.core_speed
        if pool.has_own_cores:
            yield pool_index, cores
        if pool.shared:
            yield self.memory[pool_index], replicas_for(rate * costs.seconds) * costs.memory
        else:
            yield pool_index, devices_for(rate * costs.seconds, costs.smallest)

    def of(self, stages: Stages, rate: float) -> Floats:
        """Compute what each stage uses of each resource, (R, E)."""
        table = np.zeros((self.num, len(stages)))
        for index in range(len(self.problem.pools)):
            here = np.flatnonzero(stages.pool == index)
            for resource, use in self.uses(index, rate, stages.take(here)):
                table[resource, here] = use
        return table

    def parts(self, stages: Stages, rate: float) -> Floats:
        """Compute each stage's uses as fractions of the capacities, (R, E); infinite if it exceeds one by itself."""
        caps = self.capacities(np.array([rate]))
        uses = self.of(stages, rate)
        with np.errstate(divide="ignore", invalid="ignore"):
            parts = np.where(uses > 0, uses / caps, 0.0)
        return np.where(np.any(parts > 1 + TIE, axis=0), np.inf, parts)

    def best_rate(self, stages: Stages, low: float, high: float) -> float:
        """Find the highest throughput of these stages together, items per second."""
        high = min(high, self.max_rate(len(stages)))
        for _ in range(NUM_ROUNDS):
            rates = np.linspace(low, high, RATES_AT_ONCE + 2)
            num_possible = int(np.argmin([*self._possible(stages, rates[1:-1]), False]))
            low, high = rates[num_possible], rates[num_possible + 1]
        return float(low)

    def _possible(self, stages: Stages, rates: Floats) -> NDArray[np.bool_]:
        """Whether the stages together keep within the capacities at each of P rates, (P,)."""
        used = np.zeros((self.num, len(rates)))
        for index in np.unique(stages.pool):
            for resource, use in self.uses(index, rates[:, None], stages.take(stages.pool == index)):
                used[resource] += np.broadcast_to(use, (len(rates), use.shape[-1])).sum(axis=1)
        within: NDArray[np.bool_] = np.all(used <= self.capacities(rates) * (1 + TIE), axis=0)
        return within
