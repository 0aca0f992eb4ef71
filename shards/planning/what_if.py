"""Estimates for a fleet: hours and cost of a number of items, the bottleneck, the gain of more devices. No torch."""

from dataclasses import dataclass, replace
from math import ceil

from shards.model_errors import ModelError
from shards.planning.explain import stages_text
from shards.planning.problem import PlacedStage, PlacementProblem, PlanPrediction, Pool, predict
from shards.planning.solver.throughput_search import best_placement

HOUR_S = 3600.0


@dataclass(frozen=True)
class OneMore:
    """Gain (a fraction) of one more device of a type; `where` is "stage 1", or "fleet" if all is planned again."""

    where: str
    device: str
    items_per_s: float
    gain: float


@dataclass(frozen=True)
class WhatIf:
    """Answers about one fleet; `hours` are wall clock with start-up, `device_hours` include idle devices, by type.

    `cost` is None if a price is missing. At `cores_per_gpu` neither waits for the other; `cores_needed` keep the
    devices busy; from `decode_bound_gpus` on, the cores are the bottleneck; these are None without GPUs. `decode_share`
    is a fraction of an item's CPU seconds. `one_more` is the gain of one more device, in each stage and pool.
    """

    num_items: int
    items_per_s: float
    bottleneck: str
    hours: float
    device_hours: dict[str, float]
    used: dict[str, float]
    cost: float | None
    cores_per_gpu: float | None
    cores_needed: int | None
    decode_bound_gpus: int | None
    decode_share: float
    one_more: tuple[OneMore, ...]


def what_if(problem: PlacementProblem, num_stages: int, num_items: int, startup_s: float = 0.0) -> WhatIf:
    """Estimate hours, cost and bottleneck of one fleet; raises a ModelError if the stages don't fit it."""
    placement = best_placement(problem, num_stages)
    if placement is None:
        raise ModelError(
            f"what if: {stages_text(num_stages)} can't run on this fleet; `embedder plan` without --what-if says why"
        )
    prediction = predict(problem, placement.stages)
    hours = (startup_s + num_items / prediction.items_per_s) / HOUR_S
    used: dict[str, float] = {}
    for stage, load in zip(placement.stages, prediction.loads, strict=True):
        busy = prediction.items_per_s * load.cpu_seconds if stage.pool.shared else stage.devices
        used[stage.pool.device.name] = used.get(stage.pool.device.name, 0.0) + busy
    gpus = tuple(pool for pool in problem.pools if not pool.shared)
    cores = _cores_for_gpus(problem, gpus, num_stages)
    more = [*_one_more_each(problem, placement.stages, prediction), *_one_more_planned(problem, num_stages, prediction)]
    cores_per_gpu = None if cores is None else cores / sum(pool.num for pool in gpus)
    return WhatIf(
        num_items=num_items,
        items_per_s=prediction.items_per_s,
        bottleneck=prediction.bottleneck,
        hours=hours,
        device_hours={pool.device.name: pool.num * hours for pool in problem.pools},
        used=used,
        cost=_cost(problem.pools, hours),
        cores_per_gpu=cores_per_gpu,
        cores_needed=None if cores is None else ceil(cores),
        decode_bound_gpus=int(problem.num_cores / cores_per_gpu) + 1 if problem.num_cores and cores_per_gpu else None,
        decode_share=prediction.cpu_seconds["decode"] / sum(prediction.cpu_seconds.values()),
        one_more=tuple(more),
    )


def _cores_for_gpus(problem: PlacementProblem, gpus: tuple[Pool, ...], num_stages: int) -> float | None:
    """Return the cores needed if all stages run on GPUs and nothing else limits them; None if they don't fit."""
    alone = replace(problem, pools=gpus, num_cores=None)
    placement = best_placement(alone, num_stages) if gpus else None
    if placement is None:
        return None
    prediction = predict(alone, placement.stages)
    return prediction.items_per_s * sum(prediction.cpu_seconds.values())


def _cost(pools: tuple[Pool, ...], hours: float) -> float | None:
    prices = [pool.device.price_per_h for pool in pools]
    if any(price is None for price in prices):
        return None
    return sum(pool.num * (price or 0.0) * hours for pool, price in zip(pools, prices, strict=True))


def _one_more_each(
    problem: PlacementProblem, stages: tuple[PlacedStage, ...], prediction: PlanPrediction
) -> list[OneMore]:
    """Return the gain of one more device in each stage, without changing the cut."""
    found = []
    for number, stage in enumerate(stages):
        # A part of a device grows to a whole one: replicas of one stage are all alike.
        devices = stage.devices + 1 if stage.devices >= 1 else 1.0
        more, widened = problem, stages
        if stage.pool.shared and problem.num_cores is not None:
            more = replace(problem, num_cores=problem.num_cores + stage.pool.to_counted_cores(stage.pool.num_threads))
            wider = replace(stage.pool, num=stage.pool.num + stage.pool.num_threads)
            widened = tuple(replace(each, pool=wider) if each.pool is stage.pool else each for each in stages)
        grown = [*widened[:number], replace(widened[number], devices=devices), *widened[number + 1 :]]
        rate = predict(more, grown).items_per_s
        gain = rate / prediction.items_per_s - 1
        found.append(OneMore(f"stage {number}", stage.pool.device.name, rate, gain))
    return found


def _one_more_planned(problem: PlacementProblem, num_stages: int, prediction: PlanPrediction) -> list[OneMore]:
    """Return the gain of one more device in each pool, planned again."""
    found = []
    for number, pool in enumerate(problem.pools):
        pools = (*problem.pools[:number], replace(pool, num=pool.num + 1), *problem.pools[number + 1 :])
        cores = problem.num_cores
        if pool.shared and cores is not None:
            cores += pool.to_counted_cores(1.0)
        more = replace(problem, pools=pools, num_cores=cores)
        placement = best_placement(more, num_stages)
        rate = prediction.items_per_s  # a device that is left idle is no loss
        if placement is not None:
            rate = max(rate, predict(more, placement.stages).items_per_s)
        found.append(OneMore("fleet", pool.device.name, rate, rate / prediction.items_per_s - 1))
    return found
