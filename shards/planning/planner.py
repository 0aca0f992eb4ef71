"""Plan of a placement problem: the best placement, its costs, and a comparison with other numbers of stages. Pure."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING

from shards.config import ModelConfig
from shards.costs import (
    Dtype,
    cut_bytes_per_caption,
    cut_bytes_per_image,
    text_costs,
    vision_costs,
    weight_bytes,
)
from shards.errors import ModelError
from shards.planning.plans import PlannedStage, ShardPlan
from shards.planning.predict import PlacedStage, predict
from shards.planning.problem import PlacementProblem, StageLoad
from shards.ranges import LayerRange, ShardSpec

if TYPE_CHECKING:
    from shards.planning.solver.tie_break import Placement

# The most stages that are tried when an error names the nearest number that fits.
MAX_STAGES_TRIED = 16
CAPS = {"--weights-cap": "weights_cap_bytes", "--memory-cap": "memory_cap_bytes"}
CAP_STEP = 1.01
BOUNDLESS = 1 << 60


def plan_placement(problem: PlacementProblem, num_stages: int, *, model_fingerprint: str | None = None) -> ShardPlan:
    """Cut the model and place its stages for the highest throughput.

    Ties go to more stages that hold both towers, then fewer bytes over the cuts, then more even stages.

    Args:
        problem: the model, the workload, the devices and their costs.
        num_stages: number of stages, from 1 to the layers of both towers together.
        model_fingerprint: fingerprint of the weights that the plan is for.

    Raises:
        ModelError: no placement can run; the message names the nearest that can.
    """
    check_num_stages(problem.config, num_stages)
    placement = _search(problem, num_stages)
    if placement is None:
        raise ModelError(_why_not(problem, num_stages))
    plan = plan_of(problem, placed_stages(problem, placement), model_fingerprint=model_fingerprint)
    reasons = [_alternative(problem, number, placement.items_per_s) for number in (num_stages - 1, num_stages + 1)]
    return replace(plan, reasons=tuple(reason for reason in reasons if reason))


def _search(problem: PlacementProblem, num_stages: int) -> "Placement | None":
    """Run the solver; it needs NumPy, which is not imported where plans are only read."""
    from shards.planning.solver.search import best_placement

    return best_placement(problem, num_stages)


def plan_of(
    problem: PlacementProblem, stages: Sequence[PlacedStage], *, model_fingerprint: str | None = None
) -> ShardPlan:
    """Make the plan of a given placement, with its costs and the prediction.

    Args:
        problem: the model, the workload, the devices and their costs.
        stages: the stages with their pools.
        model_fingerprint: fingerprint of the weights that the plan is for.
    """
    prediction = predict(problem, stages)
    sources = {pool.costs.source for pool in problem.pools}
    return ShardPlan(
        model_fingerprint=model_fingerprint,
        stages=tuple(_planned(problem, stage, load) for stage, load in zip(stages, prediction.loads, strict=True)),
        mix=problem.mix,
        dtype=problem.dtype,
        costs="measured" if sources == {"measured"} else "estimated",
        items_per_s=prediction.items_per_s,
        bottleneck=prediction.bottleneck,
    )


def placed_stages(problem: PlacementProblem, placement: "Placement") -> list[PlacedStage]:
    """Make the stages of a placement."""
    specs = specs_between(placement.cuts)
    return [
        PlacedStage(spec, problem.pools[pool], devices)
        for spec, pool, devices in zip(specs, placement.pools, placement.devices, strict=True)
    ]


def specs_between(cuts: Sequence[tuple[int, int]]) -> list[ShardSpec]:
    """Make the specs of the layers between each cut and the next."""
    return [ShardSpec(LayerRange(start[0], stop[0]), LayerRange(start[1], stop[1])) for start, stop in pairwise(cuts)]


def bare_stage(config: ModelConfig, spec: ShardSpec, dtype: Dtype, caption_tokens: int) -> PlannedStage:
    """Make a stage with the costs that hold on any device: operations and bytes.

    Args:
        config: the model.
        spec: the layers of the stage.
        dtype: compute dtype.
        caption_tokens: length of a caption.
    """
    return PlannedStage(
        spec=spec,
        weight_bytes=weight_bytes(config, spec, dtype),
        flops_per_image=float(vision_costs(config).of(spec.vision)),
        flops_per_caption=float(text_costs(config, caption_tokens).of(spec.text)),
        cut_bytes_per_image=cut_bytes_per_image(config, spec.vision.stop, dtype),
        cut_bytes_per_caption=cut_bytes_per_caption(config, spec.text.stop, dtype, caption_tokens),
    )


def check_num_stages(config: ModelConfig, num_stages: int) -> None:
    """Check that each stage can hold at least one layer.

    Raises:
        ModelError: there are more stages than layers, or fewer than one.
    """
    num_layers = config.vision.depth + config.text.num_hidden_layers
    if not 1 <= num_stages <= num_layers:
        raise ModelError(
            f"{num_stages} stages: model {config.name!r} has {num_layers} layers, and each stage needs one; "
            f"ask for 1 to {num_layers} stages"
        )


def _planned(problem: PlacementProblem, stage: PlacedStage, load: StageLoad) -> PlannedStage:
    return replace(
        bare_stage(problem.config, stage.spec, problem.dtype, problem.mix.caption_tokens),
        device=stage.pool.device.name,
        num_replicas=stage.num_replicas,
        num_gpus=stage.num_gpus,
        num_threads=stage.pool.num_threads if stage.pool.device.kind == "cpu" else None,
        seconds_per_item=load.seconds,
        memory_bytes=load.memory_bytes,
    )


def _alternative(problem: PlacementProblem, num_stages: int, items_per_s: float) -> str | None:
    """Describe the throughput of another number of stages."""
    if not 1 <= num_stages <= sum(problem.depths):
        return None
    name = _stages(num_stages)
    placement = _search(problem, num_stages)
    if placement is None:
        return f"{name}: {_missing_resource(problem, num_stages)}"
    change = placement.items_per_s / items_per_s - 1
    return f"{name}: {placement.items_per_s:.4g} items/s ({change:+.1%})"


def _stages(num: int) -> str:
    return "1 stage" if num == 1 else f"{num} stages"


def _why_not(problem: PlacementProblem, num_stages: int) -> str:
    """Message in one line: the limit, and the nearest that fits: another number of stages, or a higher cap."""
    reason = f"plan: {_stages(num_stages)} of {problem.config.name!r}: {_missing_resource(problem, num_stages)}"
    cures = []
    most = min(sum(problem.depths), MAX_STAGES_TRIED)
    for number in sorted(range(1, most + 1), key=lambda number: abs(number - num_stages)):
        placement = _search(problem, number) if number != num_stages else None
        if placement is not None:
            cures.append(f"--stages {number} ({placement.items_per_s:.3g} items/s)")
            break
    for option, field in CAPS.items():
        least = _least_cap(problem, num_stages, field)
        if least is not None:
            cures.append(f"{option} {size_text(least)}")
    if cures:
        return f"{reason}; the nearest that can run: {' or '.join(cures)}"
    return f"{reason}; no number of stages up to {most} does, either: give more or larger devices"


def _missing_resource(problem: PlacementProblem, num_stages: int) -> str:
    """Name the limit without which the stages would fit."""
    for field, what in (("weights_cap_bytes", "weights"), ("memory_cap_bytes", "memory")):
        cap = getattr(problem, field)
        if cap is not None and _search(_with_cap(problem, field, None), num_stages) is not None:
            return f"no cut keeps each replica's {what} within {size_text(cap)}"
    roomy = tuple(replace(pool, device=replace(pool.device, memory_bytes=BOUNDLESS)) for pool in problem.pools)
    boundless = replace(problem, pools=roomy, weights_cap_bytes=None, memory_cap_bytes=None)
    if _search(boundless, num_stages) is not None:
        return "its stages' weights, activations and workspace don't fit into the devices' memory"
    return "there are too few devices for so many stages"


def _least_cap(problem: PlacementProblem, num_stages: int, field: str) -> int | None:
    """Least cap with which the stages fit, to a percent above; None where the cap is not set or not the limit."""
    low = getattr(problem, field)
    if low is None or _search(_with_cap(problem, field, None), num_stages) is None:
        return None
    high = 2 * low
    while _search(_with_cap(problem, field, high), num_stages) is None:
        low, high = high, 2 * high
    while high > low * CAP_STEP:
        middle = (low + high) // 2
        if _search(_with_cap(problem, field, middle), num_stages) is None:
            low = middle
        else:
            high = middle
    return int(high)


def _with_cap(problem: PlacementProblem, field: str, cap_bytes: int | None) -> PlacementProblem:
    return replace(problem, **{field: cap_bytes})  # type: ignore[arg-type]


def size_text(size_bytes: int) -> str:
    """Format a size, rounded up, as the options accept it."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size_bytes >= 1 << power:
            return f"{ceil(size_bytes * 100 / (1 << power)) / 100:g}{unit}"
    return f"{size_bytes}B"
