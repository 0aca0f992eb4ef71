"""Comparison of the planned cut with cutting each tower in equal parts, both placed as well as possible."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from shards.costs import weight_bytes
from shards.planning.planner import specs_between
from shards.planning.problem import PlacementProblem, StageLoad
from shards.planning.solver.resources import Resources, Stages, smallest_part
from shards.planning.solver.search import MIN_RATE_SHARE, best_placement
from shards.ranges import ShardSpec

# Throughputs that differ by less count as equal: costs are not known more precisely.
AS_GOOD = 0.02


@dataclass(frozen=True)
class PlanComparison:
    """Items per second of the planned cut and of equal parts of each tower; 0 where equal parts don't fit."""

    planned: float
    equal_parts: float

    @property
    def gain(self) -> float:
        """Speed-up of the planned cut, as a factor."""
        return self.planned / self.equal_parts if self.equal_parts else float("inf")

    def __str__(self) -> str:
        if not self.equal_parts:
            return "each tower in equal parts: doesn't fit"
        verdict = "as good as the planned cut" if self.gain < 1 + AS_GOOD else f"the planned cut does {self.gain:.2f}x"
        return f"each tower in equal parts: {self.equal_parts:.4g} items/s; {verdict}"


def equal_parts(problem: PlacementProblem, num_stages: int) -> list[ShardSpec]:
    """Cut each tower into as many parts as there are stages, as equal as whole layers allow."""
    depths = problem.depths
    cuts = [(round(depths[0] * n / num_stages), round(depths[1] * n / num_stages)) for n in range(num_stages + 1)]
    return specs_between(cuts)


def compare_with_equal_parts(problem: PlacementProblem, num_stages: int) -> PlanComparison:
    """Place the planned cut and equal parts on the same devices, each as well as possible.

    Raises:
        ValueError: not even the planned cut fits.
    """
    placement = best_placement(problem, num_stages)
    if placement is None:
        raise ValueError("no cut fits; plan first")
    return PlanComparison(placement.items_per_s, best_rate_of_cut(problem, equal_parts(problem, num_stages)))


def best_rate_of_cut(problem: PlacementProblem, specs: Sequence[ShardSpec]) -> float:
    """Find the highest throughput of a given cut over all placements, items per second; 0 where none fits."""
    options = [
        [(pool, problem.load(problem.pools[pool], spec)) for pool in _pools_for(problem, spec)] for spec in specs
    ]
    return max((_rate(problem, choice) for choice in product(*options)), default=0.0)


def _pools_for(problem: PlacementProblem, spec: ShardSpec) -> list[int]:
    """Pools on whose devices one replica fits."""
    weights_cap = problem.weights_cap_bytes
    if weights_cap is not None and weight_bytes(problem.config, spec, problem.dtype) > weights_cap:
        return []
    pools = enumerate(problem.pools)
    return [index for index, pool in pools if problem.load(pool, spec).memory_bytes <= problem.replica_cap_bytes(pool)]


def _rate(problem: PlacementProblem, choice: Sequence[tuple[int, StageLoad]]) -> float:
    """Items per second of stages on chosen pools; 0 where they don't fit there together."""
    pools = [problem.pools[index] for index, _ in choice]
    memory = np.array([float(load.memory_bytes) for _, load in choice])
    cuts = np.arange(len(choice))
    stages = Stages(
        start=cuts,
        stop=cuts + 1,
        pool=np.array([index for index, _ in choice]),
        seconds=np.array([load.seconds for _, load in choice]),
        cpu_seconds=np.array([load.cpu_seconds for _, load in choice]),
        memory=memory,
        smallest=np.concatenate([smallest_part(memory[[cut]], pool) for cut, pool in zip(cuts, pools, strict=True)]),
    )
    resources = Resources(problem)
    slowest = max(load.seconds / pool.num for pool, (_, load) in zip(pools, choice, strict=True))
    high = min(resources.max_rate, 2 / slowest)
    rate = resources.best_rate(stages, 0.0, high)
    return rate if rate > high * MIN_RATE_SHARE else 0.0
