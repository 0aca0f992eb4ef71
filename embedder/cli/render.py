"""What a person sees on the terminal: progress on standard error, results on standard output."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from embedder.cli.terminal import Terminal
from embedder.report.plan_records import Expected, Review
from embedder.report.schema import Report, StepReport

MIB = 1 << 20


class TerminalWatcher:
    """Shows a run on standard error; lines where that is no terminal."""

    def __init__(self) -> None:
        self.console = Terminal(stderr=True)

    def say(self, message: str) -> None:
        """Print one line."""
        self.console.print(message, style="dim", soft_wrap=True)

    @contextmanager
    def progress(self, num_items: int) -> Iterator[Callable[[int], None]]:
        """Draw a bar over `num_items` items."""
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console, transient=True) as bar:
            task = bar.add_task("starting", total=num_items or None, rate="")

            def on_progress(num_done: int) -> None:
                seconds = bar.tasks[0].elapsed or 0
                rate = f"{num_done / seconds:.0f} items/s" if seconds else ""
                bar.update(task, completed=num_done, description="embedding", rate=rate)

            yield on_progress


def step_table(report: Report) -> Table:
    """The steps of a run as a table: how busy each was, and what it handed on."""
    replicas = [replicas_over_time(step) for step in report.steps]
    has_grown = any(replicas)
    table = Table(box=None, pad_edge=False, header_style="dim")
    shown = ["replicas"] if has_grown else []
    for name in ("step", "rows", *shown, "wall share", "CPU share", "out, KiB/row", "peak RSS, MiB"):
        table.add_column(name, justify="left" if name == "step" else "right")
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
    """The numbers of replicas in their order, with the seconds at which a stage grew or shrank."""
    if step.max_replicas == 1:
        return ""
    # All go at the end, one after another; that is no news.
    line = list(step.replicas)
    while len(line) > 1 and line[-1][1] < line[-2][1]:
        line.pop()
    first, *later = line
    return " ".join([str(first[1]), *(f"> {number} at {time_s:.0f} s" for time_s, number in later)])


def review_table(review: Review, expected: Expected) -> Table:
    """Seconds of an item by step: expected and observed."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("step", "expected, ms/item", "observed, ms/item", "observed / expected"):
        table.add_column(name, justify="left" if name == "step" else "right")
    for step, observed_s in sorted(review.observed_seconds_per_item.items()):
        said_s = expected.seconds_per_item.get(step)
        known = ("", "") if not said_s else (f"{1e3 * said_s:.2f}", f"{observed_s / said_s:.2f}")
        table.add_row(step, known[0], f"{1e3 * observed_s:.2f}", known[1])
    return table


def review_parts(review: Review, items_per_s: float) -> list[RenderableType]:
    """The run against what was expected of it, where costs were measured; and the better plan where there is one."""
    parts: list[RenderableType] = []
    if review.expected:
        expected = review.expected
        held = (
            f"items held {review.images_per_item:.3g} pictures and {review.captions_per_item:.3g} captions of "
            f"{review.caption_tokens} tokens; {expected.source} costs expect {expected.items_per_s:.3g} items/s for "
            f"that ({expected.bottleneck}), {items_per_s:.3g} were reached"
        )
        parts += [review_table(review, expected), held]
    if review.better:
        parts.append(
            f"a better cut for this data, predicted {review.better.gain:.2f}x: {review.better.reason}; "
            f"run it with --plan {review.better.path}"
        )
    return parts


def report_parts(report: Report) -> list[RenderableType]:
    """The report as a person reads it."""
    if report.held:
        return [report.outcome]
    if report.run_id is None:
        return [f"{report.outcome}: {report.num_unchanged:,} items unchanged; {report.wall_s:.1f} s in all"]
    embedded = report.num_items - report.num_rejected - report.num_taken_over
    summary = (
        f"{embedded:,} items embedded, {report.num_rejected:,} rejected; {report.num_vectors:,} rows; "
        f"{report.items_per_s:.3g} items/s; {report.wall_s:.1f} s in all, {report.startup_s:.1f} s of it start-up; "
        f"peak memory {report.peak_memory_bytes / MIB:,.0f} MiB; run {report.run_id}"
    )
    last = [summary, *_besides(report)]
    if not report.steps:
        return last
    review = review_parts(report.review, report.items_per_s) if report.review else []
    return [step_table(report), *review, *_on_gpus(report), *last]


def _on_gpus(report: Report) -> list[RenderableType]:
    """On what each stage computed, where any held a GPU."""
    if not any(place.num_gpus for place in report.places):
        return []
    places = [f"stage {place.stage} on {place.device} ({place.num_gpus:g} GPU)" for place in report.places]
    return [", ".join(places)]


def _besides(report: Report) -> list[RenderableType]:
    """What a refresh does beside embedding, and how it ended where that is no matter of course."""
    counts = {
        "equal though touched": report.num_equal,
        "retired": report.num_retired,
        "rejected and stale": report.num_stale,
    }
    counts |= {f"taken over from run {run_id}, not computed again": num for run_id, num in report.taken_from.items()}
    named = ", ".join(f"{num:,} {what}" for what, num in counts.items() if num)
    forced = [f"guard {guard['name']} was overridden: {guard['message']}" for guard in report.guards if guard["forced"]]
    ended = [] if report.outcome == "published" else [report.outcome]
    return [*([named] if named else []), *forced, *ended]
