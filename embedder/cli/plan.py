"""`embedder plan`: where the model is cut and where its stages run, shown and written."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.table import Table

from embedder.cli.options import Dtype, ModelUri, NumStages, ReadConfig, command
from embedder.cli.results import MIB, Result, new_table

if TYPE_CHECKING:
    from embedder.planning.answer import Answer
    from shards.plan import PlannedStage, ShardPlan
    from shards.planning.problem import PlacementProblem
    from shards.planning.what_if import WhatIf

DEFAULT_NUM_ITEMS = 1_000_000  # items of --what-if, unless an option says otherwise
BAR = 24  # characters of a stage that is always busy


@command
def plan(
    read: ReadConfig,
    model: ModelUri = None,
    num_stages: NumStages = None,
    dtype: Dtype = None,
    devices: Annotated[str | None, typer.Option(help="A fleet, as 2xA100:80GB, 4xT4@0.5, 8xCPU.")] = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="For a Ray cluster; measures on each type of node.")
    ] = False,
    ray_address: Annotated[str | None, typer.Option(help="Ray cluster, for --cluster.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan file, for `embed --plan`.")] = None,
    estimate: Annotated[bool, typer.Option("--estimate", help="By operations and bandwidth: measure nothing.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="How busy each stage is, who spends CPU, why.")] = False,
    what_if: Annotated[bool, typer.Option("--what-if", help="Hours, cost, ratios; what one more device buys.")] = False,
    num_items: Annotated[int | None, typer.Option(min=1, help="Items to embed, for --what-if.")] = None,
    data: Annotated[str | None, typer.Option("--bytes", help="Data to embed instead, as 200TB.")] = None,
    item: Annotated[str | None, typer.Option("--item-bytes", help="Mean size of an item, as 150kB.")] = None,
    images_per_item: Annotated[float, typer.Option(help="Images and video frames of an item, on average.")] = 1.0,
    captions_per_item: Annotated[float, typer.Option(help="Captions of an item, on average.")] = 1.0,
    caption_tokens: Annotated[int, typer.Option(help="Tokens of a caption, on average.")] = 16,
    image_patches: Annotated[int | None, typer.Option(help="Patches of an image, of a NaFlex model.")] = None,
    memory_cap: Annotated[str | None, typer.Option(help="The most memory of one replica, as 8GiB.")] = None,
    weights_cap: Annotated[str | None, typer.Option(help="The most weights of one replica, as 2GiB.")] = None,
) -> Result:
    """Plan the cut and where its stages run, and say why."""
    from embedder.engine import hardware
    from embedder.planning import answer as planning
    from embedder.planning.options import PlanOptions, items_in, parse_size
    from shards.planning.costs import DataMix

    asked = items_in(num_items, data, item)
    options = PlanOptions(
        mix=DataMix(images_per_item, captions_per_item, caption_tokens, image_patches),
        devices=devices,
        cluster=cluster,
        estimate=estimate,
        memory_cap_bytes=parse_size("--memory-cap", memory_cap),
        weights_cap_bytes=parse_size("--weights-cap", weights_cap),
        explain=explain,
        num_items=asked or DEFAULT_NUM_ITEMS if what_if else asked,
        out=out,
    )
    run = read({"model": model, "num_stages": num_stages, "dtype": dtype, "ray_address": ray_address})
    answer = planning.plan(run, options)
    shown = [*answer.node_types, *_answer_parts(answer, explain=explain)]
    if devices is None and not cluster and (num_gpus := hardware.num_gpus()):
        shown.append(
            f"for CPU cores, without the {num_gpus} GPU(s) here; to place stages on them, name them: --devices"
        )
    text = answer.plan.to_json()
    if out is not None:
        out.write_text(text, encoding="utf-8")
        shown.append(f"plan: {out}")
    found = json.loads(text)
    if answer.node_types:
        found["node_types"] = list(answer.node_types)
    if answer.comparison is not None:
        found["equal_parts_items_per_s"] = answer.comparison.equal_parts
    if answer.what_if is not None:
        found["what_if"] = asdict(answer.what_if)
    return Result(found, shown)


def _answer_parts(answer: "Answer", *, explain: bool) -> list[RenderableType]:
    """Everything that was asked, part by part."""
    cut = answer.plan
    parts: list[RenderableType] = [_plan_table(cut, explain=explain), *_summary_lines(cut)]
    if explain:
        parts.append(_cpu_line(answer.problem, cut))
    if answer.comparison is not None:
        parts.append(str(answer.comparison))
    if answer.what_if is not None:
        parts += _what_if_parts(answer.what_if)
    return parts


def _plan_table(cut: "ShardPlan", *, explain: bool) -> Table:
    """One row for each stage; a bar shows how busy its replicas are."""
    columns = ["stage", "on", "image layers", "text layers", "weights, MiB", "memory, MiB", "ms/item", "out, KiB/item"]
    rows = [[str(number), *_row(cut, stage)] for number, stage in enumerate(cut.stages)]
    if explain:
        columns.append("busy")
        rows = [[*row, _bar(cut, stage)] for row, stage in zip(rows, cut.stages, strict=True)]
    return new_table(*columns, left=("stage", "on", "busy"), rows=rows)


def _row(cut: "ShardPlan", stage: "PlannedStage") -> list[str]:
    mix = cut.mix
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


def _where(stage: "PlannedStage") -> str:
    """Replicas and their devices: `4 x T4`, `1/2 H200`, `2 x CPU`."""
    if stage.num_gpus and stage.num_gpus < 1:
        return f"1/{round(1 / stage.num_gpus)} {stage.device}"
    return f"{stage.num_replicas} x {stage.device}"


def _bar(cut: "ShardPlan", stage: "PlannedStage") -> str:
    """Share of the time that a stage's replicas work at the predicted throughput, drawn and in percent."""
    speed = stage.num_gpus * stage.num_replicas if stage.num_gpus else stage.num_replicas
    share = (cut.items_per_s or 0.0) * (stage.seconds_per_item or 0.0) / speed
    return "█" * round(share * BAR) + "░" * (BAR - round(share * BAR)) + f" {share:.0%}"


def _summary_lines(cut: "ShardPlan") -> list[RenderableType]:
    """Throughput, bottleneck, why not fewer or more stages."""
    lines: list[RenderableType] = [f"{cut.items_per_s or 0:.4g} items/s predicted; bottleneck: {cut.bottleneck}"]
    lines += [f"why not {reason}" for reason in cut.reasons]
    source = "costs measured" if cut.costs == "measured" else "costs estimated from operations and bandwidth"
    mix = cut.mix
    if mix is not None:
        patches = f" of {mix.image_patches} patches" if mix.image_patches is not None else ""
        lines.append(
            f"for items of {mix.images_per_item:g} image(s){patches} and {mix.captions_per_item:g} caption(s) of "
            f"{mix.caption_tokens} tokens, in {cut.dtype}; {source}; ranges are half-open"
        )
    return lines


def _cpu_line(problem: "PlacementProblem", cut: "ShardPlan") -> str:
    """CPU seconds of the hosts by what spends them, as predicted for the plan on the problem's devices."""
    from shards.planning.problem import PlacedStage, predict

    pools = {pool.device.name: pool for pool in problem.pools}
    stages = [
        PlacedStage(stage.spec, pools[stage.device or ""], stage.num_replicas * (stage.num_gpus or 1.0))
        for stage in cut.stages
    ]
    prediction = predict(problem, stages)
    spent = ", ".join(f"{name} {seconds * 1e3:.3g}" for name, seconds in prediction.cpu_seconds.items())
    rate = prediction.cores_rate
    limit = "" if rate is None else f"; {problem.num_cores:g} shared cores do {rate:.4g} items/s"
    return f"CPU ms/item: {spent}{limit}"


def _what_if_parts(found: "WhatIf") -> list[RenderableType]:
    """Hours, cost, ratios, and the gain of one more device of each kind."""
    hours = ", ".join(f"{value:,.0f} {name}-hours" for name, value in found.device_hours.items())
    used = ", ".join(f"{value:.3g} {name}" for name, value in found.used.items())
    cost = "" if found.cost is None else f"; cost {found.cost:,.0f}"
    lines: list[RenderableType] = [
        f"{found.num_items:,} items: {found.hours:,.1f} h ({found.hours / 24:,.1f} days); {hours}{cost}",
        f"in use by stages: {used}",
    ]
    if found.cores_per_gpu is not None:
        lines.append(
            f"best CPU:GPU ratio: {found.cores_per_gpu:.3g} cores per GPU ({found.cores_needed:,} for these GPUs); "
            f"decoding is {found.decode_share:.0%} of the CPU seconds"
        )
    if found.decode_bound_gpus is not None:
        lines.append(f"from {found.decode_bound_gpus:,} GPUs on, these cores are the bottleneck, decoding first")
    rows = [(more.device, more.where, f"{more.items_per_s:.4g}", f"{more.gain:+.1%}") for more in found.one_more]
    return [*lines, new_table("one more", "in", "items/s", "gain", left=("one more", "in"), rows=rows)]
