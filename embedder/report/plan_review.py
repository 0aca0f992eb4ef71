"""Comparison of a finished run with its prediction, and the better cut for the data that it met."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from embedder.config import RunConfig
from embedder.engine.job import Job, rows_per_batch
from embedder.engine.resources import Allocation, Available
from embedder.planning.sample import observed_mix
from embedder.report.plan_records import BetterPlan, Expected, Review
from embedder.report.prediction import Host, RunPrediction, StageShape, balanced_cut, predict
from embedder.report.schema import StepReport
from embedder.store.layout import run_file
from shards.plan import plan_specs
from shards.planning.costs import HostCosts, ModelCosts
from shards.planning.workload import DataMix
from shards.ranges import ShardSpec

PLAN_FILE = "better_plan.json"

# A cut that promises less than this over the one that ran is no reason to change: predictions are no better.
MIN_GAIN = 1.10


@dataclass(frozen=True)
class Observed:
    """Measurements of a run.

    Attributes:
        steps: sums over the session's calls.
        decode_calls: the decode step's `embedder.store.step_metrics.Measurement` values.
        num_items: items that the session finished.
        engine_cpu_s: CPU seconds of Ray alone; none where they are not known.
    """

    steps: Sequence[StepReport]
    decode_calls: Sequence[dict[str, Any]]
    num_items: int
    engine_cpu_s: float | None


def review_run(
    job: Job, available: Available, observed: Observed, costs: tuple[ModelCosts, HostCosts] | None
) -> Review | None:
    """Compare a run with its costs; where another cut promises `MIN_GAIN`, write its plan beside the report.

    Args:
        job: the job that ran on Ray.
        available: the machine, or the cluster.
        observed: measurements of the run.
        costs: of the model on such a device, and of the host; none where nobody has measured or estimated them.

    Returns:
        The review; none where nothing was finished.
    """
    if not observed.num_items:
        return None
    mix = observed_mix(observed.decode_calls, observed.num_items)
    seconds = {step.step: _seconds_per_item(job, step, observed.num_items) for step in observed.steps}
    if observed.engine_cpu_s is not None:
        seconds["engine"] = observed.engine_cpu_s / observed.num_items
    expected = better = None
    if costs is not None:
        shapes, host = _as_run(job, observed.steps), host_of(job.config, job.allocation, available)
        found = predict(job.model.config, job.config.dtype, shapes, *costs, mix, host)
        expected = _expected(found, costs)
        better = _better_plan(job, shapes, host, mix, _as_observed(costs, found, seconds, mix))
    return Review(
        images_per_item=mix.images_per_item,
        captions_per_item=mix.captions_per_item,
        caption_tokens=mix.caption_tokens,
        observed_seconds_per_item=seconds,
        expected=expected,
        better=better,
    )


def _seconds_per_item(job: Job, step: StepReport, num_items: int) -> float:
    """Seconds of an item in a step: CPU seconds, which other work does not change; of threads and GPUs, wall time."""
    by_clock = any(
        step.step == f"stage {stage.index}" and (stage.device != "cpu" or stage.num_threads > 1) for stage in job.stages
    )
    return (step.wall_s if by_clock else step.cpu_s) / num_items


def shapes_of(specs: Sequence[ShardSpec], allocation: Allocation) -> list[StageShape]:
    """Shapes of the stages as a run starts: with their threads, and the fewest replicas."""
    return [
        StageShape(spec, stage.min_replicas, stage.num_threads if stage.device == "cpu" else 0)
        for spec, stage in zip(specs, allocation.stages, strict=True)
    ]


def host_of(config: RunConfig, allocation: Allocation, available: Available) -> Host:
    """Host as the stages leave it: cores that all share, and processes left to decoding.

    Args:
        config: the run.
        allocation: resources of its steps.
        available: the machine, or the cluster.
    """
    left_cpus = available.num_cpus - sum(stage.min_replicas * stage.num_cpus for stage in allocation.stages)
    return Host(
        num_cores=available.num_cpus if config.ray_address is None else None,
        num_decoders=max(1, int(left_cpus / allocation.decode_cpus)),
        rows_per_batch=rows_per_batch(config),
    )


def _as_run(job: Job, steps: Sequence[StepReport]) -> list[StageShape]:
    """Shapes of the stages with the most replicas that were at work."""
    num_replicas = {step.step: step.max_replicas for step in steps}
    shapes = shapes_of([stage.shard for stage in job.stages], job.allocation)
    return [replace(shape, num_replicas=num_replicas.get(f"stage {index}", 1)) for index, shape in enumerate(shapes)]


def _expected(found: RunPrediction, costs: tuple[ModelCosts, HostCosts]) -> Expected:
    seconds = {f"stage {index}": stage_s for index, stage_s in enumerate(found.stage_s)}
    host = costs[1]
    seconds |= {"decode": found.decode_s, "write": host.write_s_per_item, "engine": host.engine_s_per_item}
    return Expected(
        source=costs[0].source, items_per_s=found.items_per_s, bottleneck=found.bottleneck, seconds_per_item=seconds
    )


def _as_observed(
    costs: tuple[ModelCosts, HostCosts], found: RunPrediction, seconds: dict[str, float], mix: DataMix
) -> tuple[ModelCosts, HostCosts]:
    """Scale the costs to the level that the run found: all towers by one factor, the host's work as it was.

    Args:
        costs: of the model and of the host.
        found: prediction by these costs.
        seconds: observed seconds of one item by step.
        mix: contents of the items.
    """
    observed_s = sum(value for step, value in seconds.items() if step.startswith("stage"))
    factor = observed_s / sum(found.stage_s)
    model, host = costs
    model = replace(
        model,
        vision=model.vision.scaled(factor, factor, factor),
        text=model.text.scaled(factor, factor, factor),
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


def _better_plan(
    job: Job, shapes: Sequence[StageShape], host: Host, mix: DataMix, costs: tuple[ModelCosts, HostCosts]
) -> BetterPlan | None:
    """Find the best cut for the data that came, and write its plan where it is worth a change.

    Args:
        job: the job that ran.
        shapes: its stages, as they ran.
        host: the machine around them.
        mix: contents of the items.
        costs: of the model and of the host, at the level that the run found.
    """
    config, dtype = job.model.config, job.config.dtype
    specs = balanced_cut(config, dtype, len(shapes), *costs, mix, host)
    cut = [replace(shape, spec=spec) for shape, spec in zip(shapes, specs, strict=True)]
    now = predict(config, dtype, shapes, *costs, mix, host)
    then = predict(config, dtype, cut, *costs, mix, host)
    gain = then.items_per_s / now.items_per_s
    if gain < MIN_GAIN:
        return None
    path = run_file(job.run.run_id, PLAN_FILE)
    plan = plan_specs(
        config, specs, dtype=dtype, caption_tokens=mix.caption_tokens, model_fingerprint=job.model.fingerprint
    )
    plan = replace(plan, mix=mix, costs=costs[0].source, items_per_s=then.items_per_s, bottleneck=then.bottleneck)
    job.files.write(path, plan.to_json().encode())
    reason = (
        f"items held {mix.images_per_item:.2g} pictures and {mix.captions_per_item:.2g} captions of "
        f"{mix.caption_tokens} tokens, and {now.bottleneck} limits this cut to {now.items_per_s:.3g} items/s; "
        f"the other one would reach {then.items_per_s:.3g}"
    )
    return BetterPlan(path=job.files.uri(path), gain=gain, reason=reason)
