"""Report of a run for people: steps, review of the plan, summary."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from embedder.cli.results import new_table
from embedder.quantities import MIB, duration_text, figure, money, plural, rate, size_text
from embedder.report.report_schema import Expected, PlaceReport, Report, Review, StepReport
from embedder.storage.printable import printable

MAX_SHOWN, MAX_ID_CHARACTERS = 3, 80  # of ids in a line


def report_parts(report: Report) -> list[RenderableType]:
    """Lay out the report for people."""
    if report.held:
        return [report.outcome]
    if report.run_id is None:
        unchanged = plural(report.num_unchanged, "item")
        return [f"{report.outcome}: 0 new or changed, {unchanged} unchanged; {_seconds(report.wall_s)} in all"]
    embedded = report.num_items - report.num_rejected - report.num_taken_over
    summary = (
        f"{plural(embedded, 'item')} embedded, {report.num_rejected:,} rejected; "
        f"{plural(report.num_vectors, 'row')}{_of_rejects(report)}; {rate(report.items_per_s)}{_steady(report)}; "
        f"{_seconds(report.wall_s)} in all, {_seconds(report.startup_s)} of it start-up; "
        f"peak memory {size_text(report.peak_memory_bytes)}; run {report.run_id}"
    )
    last = [summary, *metric_lines(report.metrics), *_outcome_lines(report)]
    if not report.steps:
        return last
    wait = largest_wait(report.steps, report.observed_bottleneck, has_models=bool(report.models))
    rate_reached = report.steady_items_per_s or report.items_per_s
    review = review_parts(report.review, rate_reached, wait) if report.review else []
    notes = [note for step in report.steps for note in step.notes]
    inputs = [*clip_lines(report.steps), *_caption_lines(report), *_gpu_lines(report), *notes]
    return [_step_table(report), *_operator_parts(report), *review, *inputs, *_cluster_parts(report), *last]


def _of_rejects(report: Report) -> str:
    """Describe the rows of rejects, usually not pictures: the caption of a broken picture keeps its vector."""
    return f", {report.num_reject_vectors:,} of them of rejects" if report.num_reject_vectors else ""


def metric_lines(metrics: Mapping[str, Mapping[str, Any]]) -> list[RenderableType]:
    """Return a line for each metric with its figures, without a matrix."""
    lines: list[RenderableType] = []
    for name, figures in metrics.items():
        values = [f"{key} {_plain(value)}" for key, value in figures.items() if not isinstance(value, dict)]
        lines.append(f"metric {name}: {', '.join(values)}")
    return lines


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "unknown" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _steady(report: Report) -> str:
    """Format the rate without the start, if it differs."""
    return f" ({figure(report.steady_items_per_s)} once all stages were up)" if report.steady_items_per_s else ""


def _seconds(seconds: float) -> str:
    return duration_text(round(seconds, 1))


def _operator_parts(report: Report) -> list[RenderableType]:
    if not report.operators:
        return []
    columns = ("operator", "queue", "tasks", "CPUs", "GPUs", "store, MiB", "busy", "held back, s")
    table = new_table(*columns, left=("operator",))
    for each in report.operators:
        table.add_row(
            each.name,
            f"{each.max_queued_blocks:,}",
            f"{each.max_tasks:,}",
            f"{each.num_cpus:.3g}",
            f"{each.num_gpus:.3g}",
            f"{each.max_object_store_bytes / MIB:,.1f}",
            f"{each.busy_share:.2f}",
            f"{each.backpressure_s:.1f}",
        )
    found = report.observed_bottleneck
    return [table, f"bottleneck: {found}" if found else "bottleneck: not known, the run was too short"]


def _cluster_parts(report: Report) -> list[RenderableType]:
    parts: list[RenderableType] = []
    if len(report.nodes) > 1:
        table = new_table("node", "CPUs", "GPUs", "peak memory, MiB", "steps", left=("node", "steps"))
        for node in report.nodes:
            gpus = f"{node.num_gpus:g} {node.gpu_type or ''}".strip()
            memory = f"{node.peak_memory_bytes / MIB:,.0f}"
            table.add_row(node.name, f"{node.num_cpus:g}", gpus, memory, ", ".join(node.steps) or "none")
        parts.append(table)
        parts += [f"{size_text(report.moved_bytes or 0)} of blocks were moved between nodes"]
    parts += [f"at {duration_text(round(event.at_s))}: {event.text}" for event in report.events]
    if report.spilled_bytes:
        parts.append(
            f"{size_text(report.spilled_bytes)} of blocks were moved to disk, as Ray's object store was full: "
            "the run was slower for it"
        )
    if report.cost_per_million is not None:
        of_prices = "by [prices]" if report.currency else "in the currency of [prices], which `currency` would name"
        parts.append(f"{money(report.cost_per_million, report.currency)} per million items, {of_prices}")
    return parts


def _step_table(report: Report) -> Table:
    replicas = [replicas_over_time(step) for step in report.steps]
    has_grown = any(replicas)
    figures = ("wall share", "CPU share", "out, KiB/row", "peak RSS, MiB")
    table = new_table("step", "rows", *(["replicas"] if has_grown else []), *figures, left=("step",))
    for step, numbers in zip(report.steps, replicas, strict=True):
        table.add_row(
            step.step,
            f"{step.num_rows:,}",
            *([numbers] if has_grown else []),
            f"{step.wall_share:.2f}",
            f"{step.cpu_share:.2f}",
            f"{step.bytes_per_row / 1024:.1f}",
            f"{step.peak_rss_bytes / MIB:.0f}",
        )
    return table


def replicas_over_time(step: StepReport) -> str:
    """Format the numbers of replicas in order, with the seconds at which a stage grew or shrank."""
    if step.max_replicas == 1:
        return ""
    # At the end all are stopped one after another, which needn't be shown.
    line = list(step.replicas)
    while len(line) > 1 and line[-1][1] < line[-2][1]:
        line.pop()
    first, *later = line
    return " ".join([str(first[1]), *(f"> {number} at {duration_text(round(time_s))}" for time_s, number in later)])


def review_parts(review: Review, items_per_s: float, wait: str | None = None) -> list[RenderableType]:
    """Lay out the run next to its prediction, if costs were measured, and the better plan, if any.

    `wait` is that of `largest_wait`.
    """
    parts: list[RenderableType] = []
    if review.expected and review.too_short:
        return [f"too short to judge its plan: {review.too_short}"]
    if review.expected:
        expected = review.expected
        reached = (
            f"an item held {plural(review.images_per_item, 'image')} and "
            f"{plural(review.captions_per_item, 'caption')} of "
            f"{plural(review.caption_tokens, 'token')} on average; {expected.source} costs expect "
            f"{rate(expected.items_per_s)} for that ({expected.bottleneck}), {figure(items_per_s)} were reached"
        )
        parts += [_review_table(review, expected), reached, *blame_lines(review, items_per_s, wait)]
    if review.better:
        parts.append(
            f"a better cut for this data, predicted {review.better.gain:.2f} times as fast: {review.better.reason}; "
            f"run it with --plan {review.better.path}"
        )
    return parts


def blame_lines(review: Review, items_per_s: float, wait: str | None = None) -> list[str]:
    """Name the slow step, or else the `wait`, if a run has reached less than half of its predicted rate."""
    expected = review.expected
    if expected is None or items_per_s >= expected.items_per_s / 2:
        return []
    ratios = {
        step: observed_s / expected_s
        for step, observed_s in review.observed_seconds_per_item.items()
        if (expected_s := expected.seconds_per_item.get(step))
    }
    worst = max(ratios, key=ratios.__getitem__, default=None)
    cause = (
        f"{worst} took {ratios[worst]:.1f} times as long as expected"
        if worst is not None and ratios[worst] > 1.5
        else f"no step took longer than expected; {wait or 'they waited for each other, or for Ray'}"
    )
    return [f"less than half of what was expected was reached: {cause}"]


def _review_table(review: Review, expected: Expected) -> Table:
    table = new_table("step", "expected, ms/item", "observed, ms/item", "observed / expected", left=("step",))
    for step, observed_s in sorted(review.observed_seconds_per_item.items()):
        expected_s = expected.seconds_per_item.get(step)
        known = ("", "") if not expected_s else (f"{1e3 * expected_s:.2f}", f"{observed_s / expected_s:.2f}")
        table.add_row(step, known[0], f"{1e3 * observed_s:.2f}", known[1])
    return table


def clip_lines(steps: Iterable[StepReport]) -> list[RenderableType]:
    """Return a line on the video frames decoded for each embedded one, if there are any."""
    return [
        f"clips: {step.num_decoded_frames:,} frames decoded for {step.num_frames:,} that are embedded, "
        f"{step.num_decoded_frames / step.num_frames:.1f} for each"
        for step in steps
        if step.num_frames and step.num_decoded_frames
    ]


def _caption_lines(report: Report) -> list[RenderableType]:
    """Return where the captions were found, and how many a model cuts."""
    words = {"given": "given with the items"}  # by a table, a tar or a join
    places = ", ".join(f"{num:,} {words.get(place, place)}" for place, num in report.caption_places.items())
    found: list[RenderableType] = [f"captions: {places}"] if places else []
    if not report.num_cut_captions:
        return found
    limit = "the limit of a model" if report.max_caption_tokens is None else f"{report.max_caption_tokens:,} tokens"
    return [
        *found,
        f"{plural(report.num_cut_captions, 'caption')} longer than {limit}: "
        f"{plural(report.num_cut_characters, 'character')} at the end cut, which no vector knows of",
    ]


def _gpu_lines(report: Report) -> list[RenderableType]:
    if not any(place.num_gpus for place in report.places):
        return []
    places = [f"stage {place.stage} on {place.device} ({place.num_gpus:g} GPU)" for place in report.places]
    lines = ((idle_line(step, has_models=bool(report.models)), product_line(step)) for step in report.steps)
    idle = [line for pair in lines for line in pair if line]
    num_items = report.num_items - report.num_rejected - report.num_taken_over
    return [", ".join(places), *gpu_time_lines(report.steps, report.places, num_items), *idle]


def gpu_time_lines(steps: Iterable[StepReport], places: Iterable[PlaceReport], num_items: int) -> list[str]:
    """Return the GPU time of a million items: held from the first call of any step to the last, and computing."""
    num_gpus = {f"stage {place.stage}": place.num_gpus for place in places}
    times = [
        (step.wall_s / step.wall_share, step.wall_s, num_gpus.get(step.step, 0.0)) for step in steps if step.wall_share
    ]
    held_s, computed_s = (sum(time[at] * time[2] for time in times) for at in (0, 1))
    if not num_items or not held_s:
        return []
    million = 1e6 / num_items
    return [f"GPU time of a million items: {held_s * million:,.0f} s, {computed_s * million:,.0f} of it computing"]


def idle_line(step: StepReport, *, has_models: bool = False) -> str | None:
    """Describe what the GPUs of a stage waited for between its batches; None for a stage without a GPU.

    The step's seconds are those in which the device computed; its waits are between batches. With the time before its
    first batch and after its last, they add up to the whole run. `has_models`: further models are before stage 0.
    """
    causes = _waits(step, has_models=has_models)
    if not causes:
        return None
    waited_s, whole_s = sum(causes.values()), _whole_s(step, causes)
    waited = ", ".join(f"{name} {100 * seconds / whole_s:.1f} %" for name, seconds in causes.items())
    outside = f"before its first batch and after its last {100 * (whole_s - step.wall_s - waited_s) / whole_s:.1f} %"
    computed = f"computed {100 * step.wall_s / whole_s:.1f} % of the run"
    return f"GPU of {step.step}: {computed}; waited for {waited}; {outside}"


def _waits(step: StepReport, *, has_models: bool) -> dict[str, float]:
    """Return the seconds that a stage's GPUs waited between batches, by what they waited for; empty without GPUs."""
    number = int(step.step.removeprefix("stage ")) if step.step.startswith("stage ") else 0
    before = f"stage {number - 1}" if number else "decode and models" if has_models else "decode"
    causes = {before: step.waited_input_s, "the driver": step.waited_driver_s}
    causes |= {"the object store": step.waited_store_s, "unpacking": step.waited_unpack_s}
    causes |= {"copies": step.waited_copy_s, "launches": step.waited_launch_s}
    return causes if any(causes.values()) and step.wall_share else {}


def _whole_s(step: StepReport, causes: Mapping[str, float]) -> float:
    """Return the seconds of the run, or those that the step computed and waited if clocks make these more."""
    return max(step.wall_s / step.wall_share, step.wall_s + sum(causes.values()))


def largest_wait(steps: Iterable[StepReport], bottleneck: str | None, *, has_models: bool = False) -> str | None:
    """Describe what GPUs waited for most between batches; without GPUs, the step that the others waited for, if known.

    What a stage waited for another one has its cause there.
    """
    waits = [
        (seconds / _whole_s(step, causes), step.step, cause)
        for step in steps
        for causes in [_waits(step, has_models=has_models)]
        for cause, seconds in causes.items()
        if not cause.startswith("stage ")
    ]
    share, step, cause = max(waits, default=(0.0, "", ""))
    if share:
        return f"{step}'s GPU waited most for {cause}, {100 * share:.0f} % of the run"
    return f"the other steps waited for {bottleneck}" if bottleneck else None


def product_line(step: StepReport) -> str | None:
    """Describe what a stage's layers reach of its GPU's matrix-product rate; None where that was not measured."""
    if step.product_share is None:
        return None
    share = f"{100 * step.product_share:.0f} %"
    return f"GPU of {step.step}: while it computed, its layers reached {share} of the rate of wide matrix products"


def _outcome_lines(report: Report) -> list[RenderableType]:
    """Return counts of a refresh other than embedding, overridden guards, and any outcome but `published`."""
    counts = {
        "equal though touched": report.num_equal,
        "retired": report.num_retired,
        "rejected and stale": report.num_stale,
    }
    lacking = "were ignored, as the model has no tower for them"
    counts |= {f"whose {what} {lacking}": num for what, num in report.ignored.items()}
    for run_id, num in report.taken_from.items():
        own = run_id == report.run_id
        counts["copies of other items of this run" if own else f"taken over from run {run_id}, not computed again"] = (
            num
        )
    named = ", ".join(f"{num:,} {what}" for what, num in counts.items() if num)
    forced = [f"guard {guard['name']} was overridden: {guard['message']}" for guard in report.guards if guard["forced"]]
    ended = [] if report.outcome == "published" else [report.outcome]
    checked = _check_lines(report) if report.num_checked else []
    return [*([named] if named else []), *checked, *forced, *ended]


def _check_lines(report: Report) -> list[str]:
    """Describe what a comparison of unchanged items' contents has found."""
    checked = f"{plural(report.num_checked, 'unchanged item')} checked by content"
    if not report.num_differing:
        return [f"{checked}: all equal"]
    shown = ", ".join(printable(item_id, MAX_ID_CHARACTERS) for item_id in report.differing[:MAX_SHOWN])
    differing = f"{report.num_differing:,} differed or could not be read"
    return [f"{checked}: {differing} (embedded again, or in `embedder rejects`): {shown}"]
