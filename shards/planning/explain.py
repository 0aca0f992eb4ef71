"""Explanations of a plan: what other cuts reach, and why stages don't fit and what would cure it. Pure; NumPy."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil

import numpy as np

from shards.costs import weight_bytes
from shards.planning.problem import BOUNDLESS, PlacementProblem, StageLoad
from shards.planning.solver.resources import Resources, Stages, smallest_part
from shards.planning.solver.search import MIN_RATE_SHARE, best_placement
from shards.ranges import ShardSpec, specs_between

# The most stages that are tried when an error names the nearest number that fits.
MAX_STAGES_TRIED = 16
CAPS = {"--weights-cap": "weights_cap_bytes", "--memory-cap": "memory_cap_bytes"}
CAP_STEP = 1.01

# Throughputs that differ by less count as equal: costs are not known more precisely.
AS_GOOD = 0.02


def describe_alternative(problem: PlacementProblem, num_stages: int, items_per_s: float) -> str | None:
    """Describe the throughput of another number of stages; None where a model can't be cut into that many.

    Args:
        problem: the model, the workload and the devices.
        num_stages: the other number.
        items_per_s: throughput that it is compared with.
    """
    if not 1 <= num_stages <= sum(problem.depths):
        return None
    name = _stages(num_stages)
    placement = best_placement(problem, num_stages)
    if placement is None:
        return f"{name}: {_missing_resource(problem, num_stages)}"
    change = placement.items_per_s / items_per_s - 1
    return f"{name}: {placement.items_per_s:.4g} items/s ({change:+.1%})"


def _stages(num: int) -> str:
    return "1 stage" if num == 1 else f"{num} stages"


def explain_refusal(problem: PlacementProblem, num_stages: int) -> str:
    """Explain in one line why the stages don't fit, and what does: another number of stages, or a higher cap."""
    reason = f"plan: {_stages(num_stages)} of {problem.config.name!r}: {_missing_resource(problem, num_stages)}"
    cures = []
    most = min(sum(problem.depths), MAX_STAGES_TRIED)
    for number in sorted(range(1, most + 1), key=lambda number: abs(number - num_stages)):
        placement = best_placement(problem, number) if number != num_stages else None
        if placement is not None:
            cures.append(f"--stages {number} ({placement.items_per_s:.3g} items/s)")
            break
    for option, field in CAPS.items():
        least = _least_cap(problem, num_stages, field)
        if least is not None:
            cures.append(f"{option} {_size_text(least)}")
    if cures:
        return f"{reason}; the nearest that can run: {' or '.join(cures)}"
    return f"{reason}; no number of stages up to {most} does, either: give more or larger devices"


def _missing_resource(problem: PlacementProblem, num_stages: int) -> str:
    """Name the limit without which the stages would fit."""
    for field, what in (("weights_cap_bytes", "weights"), ("memory_cap_bytes", "memory")):
        cap = getattr(problem, field)
        if cap is not None and best_placement(_with_cap(problem, field, None), num_stages) is not None:
            return f"no cut keeps each replica's {what} within {_size_text(cap)}"
    roomy = tuple(
        replace(pool, device=replace(pool.device, memory_bytes=BOUNDLESS), node_memory_bytes=None)
        for pool in problem.pools
    )
    boundless = replace(problem, pools=roomy, weights_cap_bytes=None, memory_cap_bytes=None)
    if best_placement(boundless, num_stages) is not None:
        return "its stages' weights, activations and workspace don't fit into the devices' memory"
    return f"there are too few devices for {_stages(num_stages)}"


def _least_cap(problem: PlacementProblem, num_stages: int, field: str) -> int | None:
    """Least cap with which the stages fit, to a percent above; None where the cap is not set or not the limit."""
    low = getattr(problem, field)
    if low is None or best_placement(_with_cap(problem, field, None), num_stages) is None:
        return None
    high = 2 * low
    while best_placement(_with_cap(problem, field, high), num_stages) is None:
        low, high = high, 2 * high
    while high > low * CAP_STEP:
        middle = (low + high) // 2
        if best_placement(_with_cap(problem, field, middle), num_stages) is None:
            low = middle
        else:
            high = middle
    return int(high)


def _with_cap(problem: PlacementProblem, field: str, cap_bytes: int | None) -> PlacementProblem:
    return replace(problem, **{field: cap_bytes})  # type: ignore[arg-type]


def _size_text(size_bytes: int) -> str:
    """Format a size, rounded up, as the options accept it."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size_bytes >= 1 << power:
            return f"{ceil(size_bytes * 100 / (1 << power)) / 100:g}{unit}"
    return f"{size_bytes}B"


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
