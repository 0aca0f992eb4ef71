"""Comparison of a finished run with its prediction, and a better cut for the data that it processed, if any."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from embedder.batch_schema import Measurement
from embedder.executors.job import Job, block_items
from embedder.placement.compile_choice import as_compiled
from embedder.placement.device_settings import rows_per_batch
from embedder.placement.fleet import Available
from embedder.planning.sample import observed_mix
from embedder.quantities import figure, plural, rate
from embedder.report.report_schema import BetterPlan, Expected, Review, StepReport
from embedder.store.layout import run_file
from shards.costs import Dtype
from shards.model_config import ModelConfig
from shards.model_errors import ModelError
from shards.plan import plan_specs
from shards.planning.devices import DeviceType, device_of_ray_type
from shards.planning.planning_costs import (
    CallSizes,
    DataMix,
    DeviceSpeed,
    HostCosts,
    ModelCosts,
    estimate_costs,
    estimate_host,
)
from shards.planning.problem import BOUNDLESS, DRIVER, PlacementProblem, Pool, time_sliced_s
from shards.planning.solver.throughput_search import best_placement
from shards.shard_specs import ShardSpec

PLAN_FILE = "better_plan.json"

# A cut with a smaller gain isn't worth a change: predictions are no more accurate than this.
MIN_GAIN = 1.10


@dataclass(frozen=True)
class StageShape:
    """One stage as it runs.

    `num_replicas` counts processes; `num_threads` is the number of cores that one replica keeps busy, 0 on a GPU;
    `num_gpus` is what one has of a GPU's memory, below 1 where stages share it.
    """

    spec: ShardSpec
    num_replicas: int = 1
    num_threads: int = 1
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
    """Predict the throughput of the cut `stages` for a problem of `problem_of`: that of its slowest step.

    The replicas of a step process a certain number of items per second. A machine's cores limit the sum of everything
    that uses them: decoding, stages on the CPU, writing, Ray. One thread makes all calls.
    """
    (pool,) = problem.pools
    stage_s = tuple(problem.load(pool, stage.spec).seconds for stage in stages)
    cpu_s = problem.host_seconds + sum(
        seconds * stage.num_threads for seconds, stage in zip(stage_s, stages, strict=True)
    )
    rates = {
        f"stage {index}": stage.num_replicas / seconds
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


def review_run(
    job: Job,
    available: Available,
    steps: Sequence[StepReport],
    decode_calls: Sequence[Measurement],
    num_items: int,
    engine_cpu_s: float | None,
    costs: tuple[ModelCosts, HostCosts] | None,
    too_short: str | None = None,
    speed: DeviceSpeed | None = None,
) -> Review | None:
    """Compare a run with its costs; where another cut promises `MIN_GAIN`, write its plan next to the report.

    `steps` are sums over the session's calls, `engine_cpu_s` is Ray's own CPU time, None if unknown; `costs` are None
    if never measured, and then estimated where all stages are on GPUs of one known type, by their measured `speed`
    where it is known. With `too_short`, why the run says nothing about its plan, no other cut is searched.
    Returns None if nothing was finished.
    """
    if not num_items:
        return None
    mix = observed_mix(decode_calls, num_items)
    seconds = {step.step: _seconds_per_item(job, step, num_items) for step in steps}
    if engine_cpu_s is not None:
        seconds["engine"] = engine_cpu_s / num_items
    costs = costs or _estimate_costs(job, available, mix, speed)
    found = {} if costs is None else _compare_with_costs(job, available, steps, seconds, mix, costs, too_short)
    return Review(
        images_per_item=mix.images_per_item,
        captions_per_item=mix.captions_per_item,
        caption_tokens=mix.caption_tokens,
        observed_seconds_per_item=seconds,
        too_short=too_short,
        **found,
    )


def _estimate_costs(
    job: Job, available: Available, mix: DataMix, speed: DeviceSpeed | None
) -> tuple[ModelCosts, HostCosts] | None:
    """Estimate the costs of a run on GPUs of one type; None on CPUs, on several types, or on one that no table has."""
    types, config = {node.gpu_type for node in available.nodes if node.num_gpus}, job.model.config
    if len(types) != 1 or any(stage.device != "cuda" for stage in job.stages):
        return None
    num_rows = rows_per_batch(job.compute.batch_size, job.settings)
    try:
        device, dtype = device_of_ray_type(types.pop() or ""), job.compute.settled_dtype
        device = device if speed is None else speed.apply_to(device, dtype)
        costs = estimate_costs(config, device, dtype, mix.caption_tokens, num_rows)
    except ModelError:
        return None
    return costs, estimate_host(config)


def _compare_with_costs(
    job: Job,
    available: Available,
    steps: Sequence[StepReport],
    seconds: dict[str, float],
    mix: DataMix,
    costs: tuple[ModelCosts, HostCosts],
    too_short: str | None,
) -> dict[str, Any]:
    """Return what the costs predict for the run, and the better cut if the run was long enough."""
    if all(stage.compile for stage in job.stages):
        costs = as_compiled(costs[0], job.compute, job.model.config), costs[1]
    shapes, host = _as_run(job, steps), _host_of(job, available)
    found = predict(_problem(job, costs, mix), shapes, host)
    better = None
    if too_short is None and costs[0].source == "measured":  # the table's towers may be a fifth off
        better = _better_plan(job, _problem(job, _as_observed(costs, found, seconds), mix), shapes, host)
    return {"expected": _expect(found, costs), "better": better}


def _seconds_per_item(job: Job, step: StepReport, num_items: int) -> float:
    """Return seconds per item in a step: CPU seconds, which other load doesn't affect; wall time for threads, GPUs."""
    by_clock = any(
        step.step == f"stage {stage.index}" and (stage.device != "cpu" or stage.num_threads > 1) for stage in job.stages
    )
    return (step.wall_s if by_clock else step.cpu_s) / num_items


def _host_of(job: Job, available: Available) -> Host:
    """Return the host around the stages: cores that all share, and processes left for decoding."""
    left_cpus = available.num_cpus - sum(stage.min_replicas * stage.num_cpus for stage in job.allocation.stages)
    return Host(
        num_cores=available.num_cpus if job.compute.ray_address is None else None,
        num_decoders=max(1, int(left_cpus / job.allocation.decode_cpus)),
    )


def _problem(job: Job, costs: tuple[ModelCosts, HostCosts], mix: DataMix) -> PlacementProblem:
    num_rows, calls = rows_per_batch(job.compute.batch_size, job.settings), None
    if costs[0].source == "estimated":
        num_items = block_items(job, job.num_items or sys.maxsize)
        calls = CallSizes(num_items, num_items, job.compute.rows_per_part)
    return problem_of(job.model.config, job.compute.settled_dtype, *costs, mix, num_rows, calls)


def _as_run(job: Job, steps: Sequence[StepReport]) -> list[StageShape]:
    num_replicas = {step.step: step.max_replicas for step in steps}
    return [
        StageShape(
            spec=stage.shard,
            num_replicas=num_replicas.get(f"stage {index}", 1),
            num_threads=placed.num_threads if placed.device == "cpu" else 0,
            num_gpus=placed.num_gpus or 0.0,
        )
        for index, (stage, placed) in enumerate(zip(job.stages, job.allocation.stages, strict=True))
    ]


def _expect(found: RunPrediction, costs: tuple[ModelCosts, HostCosts]) -> Expected:
    seconds = {f"stage {index}": stage_s for index, stage_s in enumerate(found.stage_s)}
    host = costs[1]
    seconds |= {"decode": found.decode_s, "write": host.write_s_per_item, "engine": host.engine_s_per_item}
    return Expected(
        source=costs[0].source, items_per_s=found.items_per_s, bottleneck=found.bottleneck, seconds_per_item=seconds
    )


def _as_observed(
    costs: tuple[ModelCosts, HostCosts], found: RunPrediction, seconds: dict[str, float]
) -> tuple[ModelCosts, HostCosts]:
    """Scale the costs to what the run observed: all towers by one factor, host work unchanged.

    `found` is the prediction by these costs; `seconds` are the observed seconds per item by step.
    """
    observed_s = sum(value for step, value in seconds.items() if step.startswith("stage"))
    factor = observed_s / sum(found.stage_s)
    model, host = costs
    model = replace(
        model,
        vision=model.vision.scale(factor, factor, factor),
        text=model.text.scale(factor, factor, factor),
        send_s_per_byte=model.send_s_per_byte * factor,
        call_s=model.call_s * factor,
    )
    decode_s = found.decode_s or 1.0
    decode_factor = seconds.get("decode", decode_s) / decode_s
    host = replace(
        host,
        decode_s_per_image=host.decode_s_per_image * decode_factor,
        tokenise_s_per_caption=host.tokenise_s_per_caption * decode_factor,
        write_s_per_item=seconds.get("write", host.write_s_per_item),
        engine_s_per_item=seconds.get("engine", host.engine_s_per_item),
    )
    return model, host


def _better_plan(job: Job, problem: PlacementProblem, shapes: Sequence[StageShape], host: Host) -> BetterPlan | None:
    """Find the best cut for the data that came, and write its plan if it is worth a change.

    The costs of `problem` are already scaled to what the run observed; `shapes` are the stages as they ran.
    """
    mix = problem.mix
    specs = balanced_cut(problem, len(shapes))
    cut = [replace(shape, spec=spec) for shape, spec in zip(shapes, specs, strict=True)]
    now, then = predict(problem, shapes, host), predict(problem, cut, host)
    gain = then.items_per_s / now.items_per_s
    if gain < MIN_GAIN:
        return None
    path = run_file(job.run.run_id, PLAN_FILE)
    plan = plan_specs(
        problem.config,
        specs,
        dtype=problem.dtype,
        caption_tokens=mix.caption_tokens,
        model_fingerprint=job.model.fingerprint,
    )
    source = problem.pools[0].costs.source
    plan = replace(plan, mix=mix, costs=source, items_per_s=then.items_per_s, bottleneck=then.bottleneck)
    job.run.files.write(path, plan.to_json().encode())
    reason = (
        f"an item held {plural(mix.images_per_item, 'image')} and {plural(mix.captions_per_item, 'caption')} of "
        f"{plural(mix.caption_tokens, 'token')} on average, and {now.bottleneck} limits this cut to "
        f"{rate(now.items_per_s)}; the other one would reach {figure(then.items_per_s)}"
    )
    return BetterPlan(path=job.run.files.uri(path), gain=gain, reason=reason)
