"""`embedder plan`: where the model is cut and where its stages run, shown and written."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.table import Table

from embedder.cli.options import Dtype, ModelUri, NumStages, ReadConfig, command, parse_size
from embedder.cli.results import Result, new_table
from embedder.cli.store_access import describe_vectors
from embedder.errors import ConfigError
from embedder.quantities import HOUR_S, KIB, MIB, duration_text, figure, money, percent, plural, rate
from embedder.storage.output_file import check_parent_folder

if TYPE_CHECKING:
    from embedder.plugins.plan.answer import PlanAnswer
    from embedder.plugins.plan.plan_options import PlanOptions
    from shards.plan import PlannedStage, ShardPlan
    from shards.planning.explain import Alternative
    from shards.planning.problem import PlacementProblem
    from shards.planning.what_if import WhatIf

DEFAULT_NUM_ITEMS = 1_000_000  # items of --what-if, unless an option says otherwise
UNNAMED_CURRENCY = ' (currency = "EUR" in the configuration names the prices\' currency)'
BAR = 24  # width of the bar of a stage that is always busy


@dataclass(frozen=True)
class PlanRequest:
    """Options that say for which devices a plan is made, from which costs, and what is shown of it."""

    devices: Annotated[str | None, typer.Option(help="A fleet, as 2xA100:80GB, 4xT4@0.5, 8xCPU.")] = None
    cluster: Annotated[bool, typer.Option("--cluster", help="For a Ray cluster; measures on each type of node.")] = (
        False
    )
    ray_address: Annotated[str | None, typer.Option(help="Ray cluster, for --cluster.")] = None
    out: Annotated[Path | None, typer.Option(help="Write the plan file, for `embed --plan`.")] = None
    estimate: Annotated[bool, typer.Option("--estimate", help="By operations and bandwidth: measure nothing.")] = False
    explain: Annotated[bool, typer.Option("--explain", help="How busy each stage is, who spends CPU, why.")] = False
    what_if: Annotated[bool, typer.Option("--what-if", help="Hours, cost, ratios; what one more device buys.")] = False


@dataclass(frozen=True)
class ItemFigures:
    """Options that describe the items that a plan is for: how many, and what an average one is made of."""

    num_items: Annotated[int | None, typer.Option(min=1, help="Items to embed, for --what-if.")] = None
    data: Annotated[str | None, typer.Option("--bytes", help="Data to embed instead, as 200TB.")] = None
    item: Annotated[str | None, typer.Option("--item-bytes", help="Mean size of an item, as 150kB.")] = None
    images_per_item: Annotated[float, typer.Option(help="Images and video frames of an item, on average.")] = 1.0
    captions_per_item: Annotated[float, typer.Option(help="Captions of an item, on average.")] = 1.0
    caption_tokens: Annotated[int, typer.Option(help="Tokens of a caption, on average.")] = 16
    image_patches: Annotated[int | None, typer.Option(help="Patches of an image, of a NaFlex model.")] = None


@dataclass(frozen=True)
class ReplicaCaps:
    """Options that bound what one replica of a stage may hold."""

    memory_cap: Annotated[str | None, typer.Option(help="The most memory of one replica, as 8GiB.")] = None
    weights_cap: Annotated[str | None, typer.Option(help="The most weights of one replica, as 2GiB.")] = None


@command
def plan(
    read: ReadConfig,
    model: ModelUri = None,
    num_stages: NumStages = None,
    dtype: Dtype = None,
    *,
    request: PlanRequest,
    figures: ItemFigures,
    caps: ReplicaCaps,
) -> Result:
    """Plan the cut and where its stages run, and say why."""
    from embedder.plugins.plan.answer import plan as make_plan

    if request.out is not None:
        check_parent_folder(request.out, "--out")  # before anything is measured
    options = _make_options(request, figures, caps)
    run = read({"model": model, "num_stages": num_stages, "dtype": dtype, "ray_address": request.ray_address})
    answer = make_plan(run, options)
    fixed_by = "--stages" if num_stages is not None else answer.fixed_by
    shown = [
        *answer.node_types,
        *([] if answer.dtype.was_asked else [f"dtype {answer.dtype}"]),
        *_answer_parts(answer, run.currency, fixed_by=fixed_by, explain=request.explain),
        *_unplanned_gpu_lines(request),
    ]
    if (vectors := describe_vectors(run)) is not None:
        shown.append(f"vectors of the store: {vectors}")
    if request.out is not None:
        _write_plan(request.out, answer.plan)
        shown.append(f"plan: {request.out}")
    return Result(_answer_data(answer, run.currency), shown)


def _write_plan(path: Path, cut: "ShardPlan") -> None:
    try:
        path.write_text(cut.to_json(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {path}: {error.strerror}; name a file that can be written") from None


def _make_options(request: PlanRequest, figures: ItemFigures, caps: ReplicaCaps) -> "PlanOptions":
    """Read sizes and counts; raises `ConfigError` where one is no size, or items are given in two ways."""
    from embedder.plugins.plan.plan_options import PlanOptions
    from shards.planning.planning_costs import DataMix

    num_items = _items_in(figures.num_items, figures.data, figures.item)
    return PlanOptions(
        mix=DataMix(figures.images_per_item, figures.captions_per_item, figures.caption_tokens, figures.image_patches),
        devices=request.devices,
        cluster=request.cluster,
        estimate=request.estimate,
        memory_cap_bytes=parse_size("--memory-cap", caps.memory_cap),
        weights_cap_bytes=parse_size("--weights-cap", caps.weights_cap),
        explain=request.explain,
        num_items=num_items or DEFAULT_NUM_ITEMS if request.what_if else num_items,
        out=request.out,
    )


def _items_in(num_items: int | None, data: str | None, item: str | None) -> int | None:
    """Return the number of items to plan for: as given, or bytes of all data (`200TB`) over the mean bytes of an item.

    Raises a ConfigError if both are given, or bytes without the size of an item.
    """
    if data is None:
        return num_items
    if num_items is not None:
        raise ConfigError("--num-items and --bytes: give one of the two")
    if item is None:
        raise ConfigError(f"--bytes {data}: how large is one item on average? Give --item-bytes, for example 150kB")
    data_bytes, item_bytes = parse_size("--bytes", data), parse_size("--item-bytes", item)
    return max(1, (data_bytes or 0) // (item_bytes or 1))


def _answer_data(answer: "PlanAnswer", currency: str | None) -> dict[str, Any]:
    """Return the plan file's content and what the answer adds to it, for `--json`."""
    found: dict[str, Any] = json.loads(answer.plan.to_json()) | {
        "num_stages_fixed_by": answer.fixed_by,
        "dtype_reason": answer.dtype.reason,
        "alternatives": [asdict(each) for each in answer.alternatives],
    }
    if answer.node_types:
        found["node_types"] = list(answer.node_types)
    if answer.comparison is not None:
        found["equal_parts_items_per_s"] = answer.comparison.equal_parts
    if answer.what_if is not None:
        found["what_if"] = asdict(answer.what_if) | {"currency": currency}
    return found


def _unplanned_gpu_lines(request: PlanRequest) -> list[RenderableType]:
    """Say that a plan for this machine is one for its CPU cores, if it has GPUs."""
    from embedder.placement import hardware

    if request.devices is not None or request.cluster or not (num_gpus := hardware.num_gpus()):
        return []
    return [f"for CPU cores, without the {plural(num_gpus, 'GPU')} here; to place stages there, name it all: --devices"]


def _answer_parts(
    answer: "PlanAnswer", currency: str | None, *, fixed_by: str | None, explain: bool
) -> list[RenderableType]:
    """Lay out everything that was asked, part by part.

    `fixed_by` is the option or key that fixes the number of stages, None if it was searched; `explain` adds how busy
    each stage is.
    """
    cut = answer.plan
    parts: list[RenderableType] = [_plan_table(cut, explain=explain)]
    parts.append(f"{rate(cut.items_per_s or 0)} predicted; bottleneck: {cut.bottleneck}")
    parts += [_stages_line(len(cut.stages), answer.alternatives, fixed_by), *_basis_lines(cut)]
    if answer.counts_compiled:
        parts.append("layers on GPUs count as compiled, as a long run has them; compile = false counts eager ones")
    if (vision := answer.problem.config.vision) is not None and vision.is_whole:
        parts.append(f"image tower ({vision.describe()}): one stage holds it, as no cut can keep its layers apart")
    if explain:
        parts.append(_cpu_line(answer.problem, cut))
    if answer.comparison is not None:
        parts.append(str(answer.comparison))
    if answer.what_if is not None:
        parts += _what_if_parts(answer.what_if, currency)
    return parts


def _plan_table(cut: "ShardPlan", *, explain: bool) -> Table:
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
        f"{stage.weight_bytes / MIB:,.1f}",
        f"{(stage.memory_bytes or 0) / MIB:,.0f}",
        figure((stage.seconds_per_item or 0) * 1e3),
        f"{sent / KIB:,.1f}",
    ]


def _where(stage: "PlannedStage") -> str:
    """Format replicas and their devices: `4 x T4`, `1/2 H200`, `2 x CPU`."""
    if stage.num_gpus and stage.num_gpus < 1:
        return f"1/{round(1 / stage.num_gpus)} {stage.device}"
    return f"{stage.num_replicas} x {stage.device}"


def _bar(cut: "ShardPlan", stage: "PlannedStage") -> str:
    """Draw the share of the time that a stage's replicas work at the predicted throughput, with percent."""
    speed = stage.num_gpus * stage.num_replicas if stage.num_gpus else stage.num_replicas
    share = (cut.items_per_s or 0.0) * (stage.seconds_per_item or 0.0) / speed
    return "█" * round(share * BAR) + "░" * (BAR - round(share * BAR)) + f" {percent(round(share, 2))}"


def _stages_line(num_stages: int, alternatives: "Sequence[Alternative]", fixed_by: str | None) -> str:
    """Describe the number of stages, the reason for it, and the effect of one fewer and one more.

    `fixed_by` is the option or key that fixes the number; None if it was searched.
    """
    from shards.planning.explain import AS_GOOD, MAX_STAGES_SEARCHED

    others = "; ".join(_alternative_text(each) for each in alternatives)
    others = f": {others}" if others else ""
    if fixed_by is None:
        why = (
            f"the fewest that no other number up to {max(MAX_STAGES_SEARCHED, num_stages)} beats by {percent(AS_GOOD)}"
        )
        return f"{plural(num_stages, 'stage')}, {why}{others}"
    gain = max((each.change for each in alternatives if each.change is not None), default=0.0)
    cure = f"; without {fixed_by} the best number is searched" if gain >= AS_GOOD else ""
    return f"{plural(num_stages, 'stage')}, fixed by {fixed_by}{others}{cure}"


def _alternative_text(other: "Alternative") -> str:
    name = plural(other.num_stages, "stage")
    if other.items_per_s is None or other.change is None:
        return f"{name} can't run, {other.lack}"
    return f"{name} would do {rate(other.items_per_s)} ({percent(other.change, signed=True)})"


def _basis_lines(cut: "ShardPlan") -> list[RenderableType]:
    mix = cut.mix
    if mix is None:
        return []
    source = "costs measured" if cut.costs == "measured" else "costs estimated from operations and bandwidth"
    patches = f" of {plural(mix.image_patches, 'patch', 'patches')}" if mix.image_patches is not None else ""
    return [
        f"for items of {plural(mix.images_per_item, 'image')}{patches} and "
        f"{plural(mix.captions_per_item, 'caption')} of "
        f"{plural(mix.caption_tokens, 'token')}, in {cut.dtype}; {source}; ranges are half-open"
    ]


def _cpu_line(problem: "PlacementProblem", cut: "ShardPlan") -> str:
    """Describe the predicted CPU seconds of the hosts by use, for the plan on the problem's devices."""
    from shards.planning.problem import PlacedStage, predict

    pools = {pool.device.name: pool for pool in problem.pools}
    stages = [
        PlacedStage(stage.spec, pools[stage.device or ""], stage.num_replicas * (stage.num_gpus or 1.0))
        for stage in cut.stages
    ]
    prediction = predict(problem, stages)
    spent = ", ".join(f"{name} {figure(seconds * 1e3)}" for name, seconds in prediction.cpu_seconds.items())
    most, cores = prediction.cores_rate, problem.num_cores
    limit = "" if most is None or cores is None else f"; shared cores, {figure(cores)} of them, do {rate(most)}"
    return f"CPU ms/item: {spent}{limit}"


def _what_if_parts(found: "WhatIf", currency: str | None) -> list[RenderableType]:
    hours = ", ".join(f"{figure(value)} {name}-hours" for name, value in found.device_hours.items())
    used = ", ".join(f"{figure(value)} {name}" for name, value in found.used.items())
    cost = "" if found.cost is None else f"; cost {money(found.cost, currency)}{'' if currency else UNNAMED_CURRENCY}"
    lines: list[RenderableType] = [
        f"{plural(found.num_items, 'item')}: {duration_text(found.hours * HOUR_S)}; {hours}{cost}",
        f"in use by stages: {used}",
    ]
    if found.cores_per_gpu is not None and found.cores_needed is not None:
        lines.append(
            f"best CPU:GPU ratio: {figure(found.cores_per_gpu)} cores per GPU ({found.cores_needed:,} for these GPUs); "
            f"decoding is {percent(found.decode_share)} of the CPU seconds"
        )
    if found.decode_bound_gpus is not None:
        lines.append(
            f"from {plural(found.decode_bound_gpus, 'GPU')} on, these cores are the bottleneck, decoding first"
        )
    rows = [
        (more.device, more.where, figure(more.items_per_s), percent(more.gain, signed=True)) for more in found.one_more
    ]
    return [*lines, new_table("one more", "in", "items/s", "gain", left=("one more", "in"), rows=rows)]
