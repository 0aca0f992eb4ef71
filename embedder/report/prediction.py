"""Throughput of a given cut: the slowest of its steps, or the cores that all of them share. Pure.

The replicas of a step reach a number of items per second; a machine's cores reach as many as their seconds hold,
whatever needs them: decoding, stages on the CPU, writing, Ray. The least of these is what a run reaches once under way.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shards.config import ModelConfig
from shards.costs import Dtype
from shards.planning.costs import DataMix, HostCosts, ModelCosts
from shards.planning.devices import DeviceType
from shards.planning.problem import BOUNDLESS, PlacementProblem, Pool
from shards.planning.solver.search import best_placement
from shards.shard_specs import ShardSpec


@dataclass(frozen=True)
class StageShape:
    """One stage as it runs.

    Attributes:
        spec: its layers.
        num_replicas: processes.
        num_threads: cores that one replica keeps busy; 0 on a GPU.
        share: part of the time that one replica may compute, below 1 under a CPU quota.
    """

    spec: ShardSpec
    num_replicas: int = 1
    num_threads: int = 1
    share: float = 1.0


@dataclass(frozen=True)
class Host:
    """Machine around the stages.

    Attributes:
        num_cores: cores that all share; none where they are not known (a cluster).
        num_decoders: decode tasks that may run at once.
    """

    num_cores: float | None
    num_decoders: int


@dataclass(frozen=True)
class RunPrediction:
    """Prediction of a run under way.

    Attributes:
        stage_s: seconds of one item in one replica of each stage.
        decode_s: CPU seconds of one item in the decode step.
        cpu_s: CPU seconds of one item in all that shares the cores.
        items_per_s: throughput of the narrowest place.
        bottleneck: name of that place.
    """

    stage_s: tuple[float, ...]
    decode_s: float
    cpu_s: float
    items_per_s: float
    bottleneck: str


def predict(problem: PlacementProblem, stages: Sequence[StageShape], host: Host) -> RunPrediction:
    """Predict the throughput of a cut.

    Args:
        problem: of `problem_of`.
        stages: the cut, and the replicas that run it.
        host: the machine.
    """
    (pool,) = problem.pools
    stage_s = tuple(problem.load(pool, stage.spec).seconds for stage in stages)
    cpu_s = problem.host_seconds + sum(
        seconds * stage.num_threads for seconds, stage in zip(stage_s, stages, strict=True)
    )
    rates = {
        f"stage {index}": stage.num_replicas * stage.share / seconds
        for index, (seconds, stage) in enumerate(zip(stage_s, stages, strict=True))
    }
    if problem.decode_seconds:
        rates["decode"] = host.num_decoders / problem.decode_seconds
    if host.num_cores is not None:
        rates["shared cores"] = host.num_cores / cpu_s
    bottleneck = min(rates, key=lambda name: rates[name])
    return RunPrediction(stage_s, problem.decode_seconds, cpu_s, rates[bottleneck], bottleneck)


def balanced_cut(problem: PlacementProblem, num_stages: int) -> list[ShardSpec]:
    """Find the cut whose slowest stage is the fastest, for one replica of each stage on equal devices."""
    pools = (replace(problem.pools[0], num=num_stages),)
    placement = best_placement(replace(problem, pools=pools), num_stages)
    if placement is None:
        raise RuntimeError("every model can be cut where nothing limits its stages")
    return [stage.spec for stage in placement.stages]


def problem_of(
    config: ModelConfig, dtype: Dtype, costs: ModelCosts, host_costs: HostCosts, mix: DataMix, rows_per_batch: int
) -> PlacementProblem:
    """State the planner's problem with one device for each stage, of any size: work and costs as predictions take them.

    Args:
        config: the model.
        dtype: compute dtype.
        costs: seconds of the layers in one replica.
        host_costs: CPU seconds of the work around them.
        mix: contents of the items.
        rows_per_batch: items that pass together.
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
    )
