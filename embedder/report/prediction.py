"""Predicted throughput of a given cut: that of its slowest step, or of the cores that all steps share. Pure.

The replicas of a step process a certain number of items per second. A machine's cores limit the sum of everything that
uses them: decoding, stages on the CPU, writing, Ray. One thread makes all calls. The least of these is the steady
throughput of a run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shards.costs import Dtype
from shards.model_config import ModelConfig
from shards.planning.devices import DeviceType
from shards.planning.planning_costs import CallSizes, DataMix, HostCosts, ModelCosts
from shards.planning.problem import BOUNDLESS, DRIVER, PlacementProblem, Pool, time_sliced_s
from shards.planning.solver.throughput_search import best_placement
from shards.shard_specs import ShardSpec


@dataclass(frozen=True)
class StageShape:
    """One stage as it runs.

    `num_replicas` counts processes; `num_threads` is the number of cores that one replica keeps busy, 0 on a GPU;
    `share` is the part of the time that one replica may compute, below 1 under a CPU quota; `num_gpus` is what one
    has of a GPU's memory, below 1 where stages share it.
    """

    spec: ShardSpec
    num_replicas: int = 1
    num_threads: int = 1
    share: float = 1.0
    num_gpus: float = 0.0


@dataclass(frozen=True)
class Host:
    """Machine around the stages: `num_cores` that all share, None if unknown (a cluster); `num_decoders` at once."""

    num_cores: float | None
    num_decoders: int


@dataclass(frozen=True)
class RunPrediction:
    """Predicted steady state of a run: `items_per_s` is the throughput of the `bottleneck`.

    That is a step, the shared cores or Ray's driver. Seconds are per item: `stage_s` in one replica of each stage,
    `decode_s` and `cpu_s` (all that shares the cores) of CPU.
    """

    stage_s: tuple[float, ...]
    decode_s: float
    cpu_s: float
    items_per_s: float
    bottleneck: str


def predict(problem: PlacementProblem, stages: Sequence[StageShape], host: Host) -> RunPrediction:
    """Predict the throughput of the cut `stages` for a problem of `problem_of`."""
    (pool,) = problem.pools
    stage_s = tuple(problem.load(pool, stage.spec).seconds for stage in stages)
    cpu_s = problem.host_seconds + sum(
        seconds * stage.num_threads for seconds, stage in zip(stage_s, stages, strict=True)
    )
    rates = {
        f"stage {index}": stage.num_replicas * stage.share / seconds
        for index, (seconds, stage) in enumerate(zip(stage_s, stages, strict=True))
    }
    rates |= _rates_on_parts(stages, stage_s)
    if problem.decode_seconds:
        rates["decode"] = host.num_decoders / problem.decode_seconds
    if host.num_cores is not None:
        rates["shared cores"] = host.num_cores / cpu_s
    rates[DRIVER] = problem.driver_rate(len(stages))
    bottleneck = min(rates, key=lambda name: rates[name])
    return RunPrediction(stage_s, problem.decode_seconds, cpu_s, rates[bottleneck], bottleneck)


def _rates_on_parts(stages: Sequence[StageShape], stage_s: Sequence[float]) -> dict[str, float]:
    """Return the items per second of stages on parts of GPUs."""
    on_parts = [index for index, stage in enumerate(stages) if 0 < stage.num_gpus < 1]
    parts = [stages[index].num_replicas * stages[index].num_gpus for index in on_parts]
    seconds = time_sliced_s([stage_s[index] for index in on_parts], parts)
    return {f"stage {index}": 1 / seconds for index in on_parts}


def balanced_cut(problem: PlacementProblem, num_stages: int) -> list[ShardSpec]:
    """Find the cut whose slowest stage is the fastest, with one replica per stage on equal devices."""
    pools = (replace(problem.pools[0], num=num_stages),)
    placement = best_placement(replace(problem, pools=pools), num_stages)
    if placement is None:
        raise RuntimeError("every model can be cut where nothing limits its stages")
    return [stage.spec for stage in placement.stages]


def problem_of(
    config: ModelConfig,
    dtype: Dtype,
    costs: ModelCosts,
    host_costs: HostCosts,
    mix: DataMix,
    rows_per_batch: int,
    calls: CallSizes | None = None,
) -> PlacementProblem:
    """State the planner's problem for predictions: work and costs, with one device of unlimited size per stage.

    `costs` are seconds of the layers in one replica, `host_costs` CPU seconds of the work around them, `mix` the
    contents of the items, and `rows_per_batch` the items that pass together.
    """
    device = DeviceType(costs.device, "gpu", {dtype: 1.0}, BOUNDLESS, 1.0)
    return PlacementProblem(
        config=config.at_patches(mix.image_patches),
        dtype=dtype,
        mix=mix,
        pools=(Pool(1, device, costs.at_mix(mix, config), max_shares=1),),
        host_seconds=host_costs.item_s(mix),
        decode_seconds=host_costs.decode_s(mix),
        rows_per_batch=rows_per_batch,
        calls=calls,
    )
