"""Explanations of a plan: what other cuts reach, and why stages don't fit and how to fix that. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil

import numpy as np

from shards.costs import weight_bytes
from shards.model_errors import ModelError
from shards.planning.problem import BOUNDLESS, PlacementProblem, StageLoad, predict
from shards.planning.solver.capacities import Resources, Stages, smallest_part
from shards.planning.solver.throughput_search import MIN_RATE_SHARE, best_placement
from shards.shard_specs import ShardSpec

# The most stages that a plan considers: more rarely gain anything, and each makes the search longer.
MAX_STAGES_SEARCHED = 8
# The most stages to try when an error names the nearest number that fits.
MAX_STAGES_TRIED = 16
CAPS = {"--weights-cap": "weights_cap_bytes", "--memory-cap": "memory_cap_bytes"}
CAP_STEP = 1.01

# Throughputs that differ by less count as equal: costs are not known more precisely.
AS_GOOD = 0.02


@dataclass(frozen=True)
class Alternative:
    """Another number of stages: what it would bring, or what it lacks.

    `items_per_s`, and its `change` from the planned number as a fraction, are None if it can't run; `lack` says why.
    """

    num_stages: int
    items_per_s: float | None = None
    change: float | None = None
    lack: str | None = None

    def __str__(self) -> str:
        if self.items_per_s is None:
            return f"{stages_text(self.num_stages)}: {self.lack}"
        return f"{stages_text(self.num_stages)}: {self.items_per_s:.4g} items/s ({self.change:+.1%})"


def find_alternative(problem: PlacementProblem, num_stages: int, items_per_s: float) -> Alternative | None:
    """Plan another number of stages; None if the model can't be cut into that many."""
    if not 1 <= num_stages <= sum(problem.cut_depths):
        return None
    placement = best_placement(problem, num_stages)
    if placement is None:
        return Alternative(num_stages, lack=_missing_resource(problem, num_stages))
    rate = predict(problem, placement.stages).items_per_s
    return Alternative(num_stages, rate, rate / items_per_s - 1)


def find_num_stages(problem: PlacementProblem) -> int:
    """Find the number of stages to plan: the fewest that no other number beats by `AS_GOOD`.

    Numbers up to `MAX_STAGES_SEARCHED` are compared. If none of them can run, because the weights of a stage are
    capped, the first number up to `MAX_STAGES_TRIED` that can is taken. Each search only looks for throughputs that
    would be worth the change, so that most searches end at once. Raises a ModelError if no number can run; the message
    names what would.
    """
    best, rate = None, 0.0
    for number in range(1, min(sum(problem.cut_depths), MAX_STAGES_TRIED) + 1):
        if best is not None and number > MAX_STAGES_SEARCHED:
            break
        placement = best_placement(problem, number, min_items_per_s=rate * (1 + AS_GOOD))
        if placement is not None:
            best, rate = number, placement.items_per_s
    if best is None:
        raise ModelError(_explain_refused_search(problem))
    return best


def stages_text(num: int) -> str:
    """Format a number of stages."""
    return "1 stage" if num == 1 else f"{num} stages"


def rate_text(items_per_s: float) -> str:
    """Format a throughput to three digits, or to the whole number of items: 0.0412, 83.5, 15,460 items/s."""
    return f"{items_per_s:,.0f} items/s" if items_per_s >= 100 else f"{items_per_s:.3g} items/s"


def explain_refusal(problem: PlacementProblem, num_stages: int) -> str:
    """Explain in one line why the stages don't fit, and what does: another number of stages, or a higher cap."""
    reason = f"plan: {stages_text(num_stages)} of {problem.config.name!r}: {_missing_resource(problem, num_stages)}"
    cures = []
    most = min(sum(problem.cut_depths), MAX_STAGES_TRIED)
    for number in sorted(range(1, most + 1), key=lambda number: abs(number - num_stages)):
        placement = best_placement(problem, number) if number != num_stages else None
        if placement is not None:
            cures.append(f"--stages {number} ({rate_text(placement.items_per_s)})")
            break
    cures += _higher_caps(problem, num_stages)
    if cures:
        return f"{reason}; the nearest that can run: {' or '.join(cures)}"
    return f"{reason}; no number of stages up to {most} does, either: give more or larger devices"


def _explain_refused_search(problem: PlacementProblem) -> str:
    """Explain in one line why no number of stages fits, and what does: a higher cap, or other devices."""
    most = min(sum(problem.cut_depths), MAX_STAGES_TRIED)
    num_stages = min(most, MAX_STAGES_SEARCHED)
    reason = (
        f"plan: no number of stages up to {most} of {problem.config.name!r} can run; of {stages_text(num_stages)}: "
        f"{_missing_resource(problem, num_stages)}"
    )
    cures = _higher_caps(problem, num_stages)
    return f"{reason}; give {' or '.join(cures) or 'more or larger devices'}"


def _higher_caps(problem: PlacementProblem, num_stages: int) -> list[str]:
    """Return the options that raise one cap as far as the stages need, if that is enough."""
    least = {option: _least_cap(problem, num_stages, field) for option, field in CAPS.items()}
    return [f"{option} {_size_text(cap)}" for option, cap in least.items() if cap is not None]


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
    return f"there are too few devices for {stages_text(num_stages)}"


def _least_cap(problem: PlacementProblem, num_stages: int, field: str) -> int | None:
    """Return the lowest cap with which the stages fit, within a percent; None if it is unset or not the limit."""
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
    """Format a size, rounded up, in the form that options accept."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size_bytes >= 1 << power:
            return f"{ceil(size_bytes * 100 / (1 << power)) / 100:g}{unit}"
    return f"{size_bytes}B"


@dataclass(frozen=True)
class PlanComparison:
    """Items per second of the planned cut and of equal parts of each tower; 0 if equal parts don't fit."""

    planned: float
    equal_parts: float

    @property
    def gain(self) -> float:
        """Speed-up of the planned cut, as a factor."""
        return self.planned / self.equal_parts if self.equal_parts else float("inf")

    def __str__(self) -> str:
        if not self.equal_parts:
            return "each tower in equal parts: doesn't fit"
        verdict = (
            "as good as the planned cut"
            if self.gain < 1 + AS_GOOD
            else f"the planned cut does {self.gain:.2f} times as many"
        )
        return f"each tower in equal parts: {rate_text(self.equal_parts)}; {verdict}"


def equal_parts(problem: PlacementProblem, num_stages: int) -> list[ShardSpec]:
    """Cut each tower into as many parts as there are stages, as equal as whole layers allow."""
    depths = problem.cut_depths
    cuts = [(round(depths[0] * n / num_stages), round(depths[1] * n / num_stages)) for n in range(num_stages + 1)]
    return problem.specs(cuts)


def compare_with_equal_parts(problem: PlacementProblem, num_stages: int) -> PlanComparison:
    """Place the best cut and equal parts on the same devices; raises ValueError if the best cut doesn't fit."""
    placement = best_placement(problem, num_stages)
    if placement is None:
        raise ValueError("no cut fits; plan first")
    return PlanComparison(placement.items_per_s, best_rate_of_cut(problem, equal_parts(problem, num_stages)))


def best_rate_of_cut(problem: PlacementProblem, specs: Sequence[ShardSpec]) -> float:
    """Find a cut's highest throughput over all placements, items per second; 0 if none fits."""
    options = [
        [(pool, problem.load(problem.pools[pool], spec)) for pool in _pools_for(problem, spec)] for spec in specs
    ]
    return max((_rate(problem, choice) for choice in product(*options)), default=0.0)


def _pools_for(problem: PlacementProblem, spec: ShardSpec) -> list[int]:
    """Return the pools whose devices fit one replica."""
    weights_cap = problem.weights_cap_bytes
    if weights_cap is not None and weight_bytes(problem.config, spec, problem.dtype) > weights_cap:
        return []
    pools = enumerate(problem.pools)
    return [index for index, pool in pools if problem.load(pool, spec).memory_bytes <= problem.replica_cap_bytes(pool)]


def _rate(problem: PlacementProblem, choice: Sequence[tuple[int, StageLoad]]) -> float:
    """Return the items per second of stages on chosen pools; 0 if they don't fit there together."""
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
    high = min(resources.max_rate(len(choice)), 2 / slowest)
    rate = resources.best_rate(stages, 0.0, high)
    return rate if rate > high * MIN_RATE_SHARE else 0.0
