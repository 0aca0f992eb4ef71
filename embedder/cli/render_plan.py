"""A plan as a person reads it."""

from rich.console import RenderableType
from rich.table import Table

from embedder.planning.answer import Answer
from shards.plan import PlannedStage, ShardPlan
from shards.planning.predict import PlanPrediction
from shards.planning.problem import PlacementProblem
from shards.planning.what_if import WhatIf

BAR = 24  # characters of a stage that is always busy
MIB = 1 << 20


def answer_parts(answer: Answer, *, explain: bool) -> list[RenderableType]:
    """Everything that was asked, part by part."""
    plan = answer.plan
    parts: list[RenderableType] = [plan_table(plan, explain=explain), *summary_lines(plan)]
    if explain:
        parts += cpu_lines(answer.problem, plan)
    if answer.comparison is not None:
        parts.append(str(answer.comparison))
    if answer.what_if is not None:
        parts += what_if_parts(answer.what_if)
    return parts


def plan_table(plan: ShardPlan, *, explain: bool) -> Table:
    """One line a stage; a bar says how busy its replicas are."""
    columns = ["stage", "on", "ViT layers", "ALBERT layers", "weights, MiB", "memory, MiB", "ms/item", "out, KiB/item"]
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in [*columns, "busy"] if explain else columns:
        table.add_column(name, justify="left" if name in {"stage", "on", "busy"} else "right")
    for number, stage in enumerate(plan.stages):
        row = _row(plan, stage)
        table.add_row(str(number), *row, *([_bar(plan, stage)] if explain else []))
    return table


def _row(plan: ShardPlan, stage: PlannedStage) -> list[str]:
    mix = plan.mix
    images, captions = (mix.images_per_item, mix.captions_per_item) if mix else (1.0, 1.0)
    sent = images * stage.cut_bytes_per_image + captions * stage.cut_bytes_per_caption
    return [
        _where(stage),
        f"{stage.spec.vision.start}-{stage.spec.vision.stop}",
        f"{stage.spec.text.start}-{stage.spec.text.stop}",
        f"{stage.weight_bytes / MIB:.1f}",
        f"{(stage.memory_bytes or 0) / MIB:.0f}",
        f"{(stage.seconds_per_item or 0) * 1e3:.3g}",
        f"{sent / 1024:.1f}",
    ]


def _where(stage: PlannedStage) -> str:
    """Replicas and their devices: `4 x T4`, `1/2 H200`, `2 x CPU`."""
    if stage.num_gpus and stage.num_gpus < 1:
        return f"1/{round(1 / stage.num_gpus)} {stage.device}"
    return f"{stage.num_replicas} x {stage.device}"


def busy_share(plan: ShardPlan, stage: PlannedStage) -> float:
    """The part of the time that a stage's replicas work, at the predicted throughput."""
    speed = stage.num_gpus * stage.num_replicas if stage.num_gpus else stage.num_replicas
    return (plan.items_per_s or 0.0) * (stage.seconds_per_item or 0.0) / speed


def _bar(plan: ShardPlan, stage: PlannedStage) -> str:
    share = busy_share(plan, stage)
    return "█" * round(share * BAR) + "░" * (BAR - round(share * BAR)) + f" {share:.0%}"


def summary_lines(plan: ShardPlan) -> list[RenderableType]:
    """Throughput, bottleneck, why not fewer or more stages."""
    lines: list[RenderableType] = [f"{plan.items_per_s or 0:.4g} items/s predicted; bottleneck: {plan.bottleneck}"]
    lines += [f"why not {reason}" for reason in plan.reasons]
    source = "costs measured" if plan.costs == "measured" else "costs estimated from operations and bandwidth"
    mix = plan.mix
    if mix is not None:
        lines.append(
            f"for items of {mix.images_per_item:g} picture(s) and {mix.captions_per_item:g} caption(s) of "
            f"{mix.caption_tokens} tokens, in {plan.dtype}; {source}; ranges are half-open"
        )
    return lines


def cpu_lines(problem: PlacementProblem, plan: ShardPlan) -> list[RenderableType]:
    """Who spends the host's CPU seconds."""
    prediction = prediction_of(problem, plan)
    spent = ", ".join(f"{name} {seconds * 1e3:.3g}" for name, seconds in prediction.cpu_seconds.items())
    limit = (
        ""
        if prediction.cores_rate is None
        else (f"; {problem.num_cores:g} shared cores do {prediction.cores_rate:.4g} items/s")
    )
    return [f"CPU ms/item: {spent}{limit}"]


def prediction_of(problem: PlacementProblem, plan: ShardPlan) -> PlanPrediction:
    """What the plan is predicted to do on the problem's devices."""
    from shards.planning.predict import PlacedStage, predict

    pools = {pool.device.name: pool for pool in problem.pools}
    stages = [
        PlacedStage(stage.spec, pools[stage.device or ""], stage.num_replicas * (stage.num_gpus or 1.0))
        for stage in plan.stages
    ]
    return predict(problem, stages)


def what_if_parts(found: WhatIf) -> list[RenderableType]:
    """Hours, cost, ratios, and what one more device buys."""
    hours = ", ".join(f"{value:,.0f} {name}-hours" for name, value in found.device_hours.items())
    idle = ", ".join(f"{value:.3g} {name}" for name, value in found.used.items())
    cost = "" if found.cost is None else f"; cost {found.cost:,.0f}"
    lines: list[RenderableType] = [
        f"{found.num_items:,} items: {found.hours:,.1f} h ({found.hours / 24:,.1f} days); {hours}{cost}",
        f"in use by stages: {idle}",
    ]
    if found.cores_per_gpu is not None:
        lines.append(
            f"best CPU:GPU ratio: {found.cores_per_gpu:.3g} cores a GPU ({found.cores_needed:,} cores for these GPUs); "
            f"decoding is {found.decode_share:.0%} of the CPU seconds"
        )
    if found.decode_bound_gpus is not None:
        lines.append(f"from {found.decode_bound_gpus:,} GPUs on, these cores are the bottleneck, decoding first")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("one more", "in", "items/s", "gain"):
        table.add_column(name, justify="left" if name in {"one more", "in"} else "right")
    for more in found.one_more:
        table.add_row(more.device, more.where, f"{more.items_per_s:.4g}", f"{more.gain:+.1%}")
    return [*lines, table]
