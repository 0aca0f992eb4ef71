"""Sums over a run's calls: each step, its replicas over time, the steady part, CPU outside of all steps. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from embedder.batch_schema import Measurement
from embedder.executors.monitor import CpuUse
from embedder.quantities import duration_text, plural
from embedder.report.report_schema import LoadReport, StepReport
from embedder.store.journal.step_metrics import LOAD

MIN_UP_S = 1.0  # a shorter time is no measurement
# Below these, warm-up calls and the blocks that were decoded while the stages loaded weigh too much.
MIN_STEADY_S = 30.0
MIN_STEADY_CALLS = 20
MAX_CALLS = 50_000
"""Most measurements in memory, about 40 MiB: those of 800,000 items in three stages, in blocks of 64."""

WAITED = tuple(f"waited_{cause}_s" for cause in ("input", "driver", "store", "unpack", "copy", "launch"))
FRAMES = ("num_frames", "num_decoded_frames")
CUTS = ("num_cut_captions", "num_cut_characters")
COUNTS = ("num_rows", "num_images", "num_captions", "num_tokens", *FRAMES, *CUTS, "num_calls")
SUMMED = ("wall_s", "cpu_s", "bytes_out", "caption_places", *COUNTS, *WAITED)

Calls = Iterable[Measurement]
"""Measurements of one step."""


def join_measurements(calls: Calls, limit: int = MAX_CALLS) -> list[Measurement]:
    """Bound the number of measurements: beyond the limit, join pairs of consecutive calls of a process.

    Sums stay the same; call counts and ends of a step become accurate only to a few calls.
    """
    held: list[Measurement] = []
    for call in calls:
        held.append(call)
        if len(held) > limit:
            held = _in_pairs(held)
            if 4 * len(held) > 3 * limit:  # calls of so many processes that pairs are few
                limit *= 2
    return held


def _in_pairs(calls: list[Measurement]) -> list[Measurement]:
    """Join every two calls of a step's process; starts of stages aren't joined."""
    found: list[Measurement] = []
    waiting: dict[tuple[str, str, int], Measurement] = {}
    for call in sorted(calls, key=lambda call: call.started_s):
        key = (call.step, call.node, call.pid)
        if call.step.startswith(LOAD):
            found.append(call)
        elif (first := waiting.pop(key, None)) is None:
            waiting[key] = call
        else:
            found.append(_sum(first, call))
    return [*found, *waiting.values()]


def _sum(first: Measurement, second: Measurement) -> Measurement:
    peaks = {name: max(getattr(first, name), getattr(second, name)) for name in ("peak_rss_bytes", "peak_gpu_bytes")}
    sums = {name: getattr(first, name) + getattr(second, name) for name in SUMMED}
    return replace(first, **peaks, **sums, note=first.note or second.note)


def split_loads(trace: Iterable[Measurement]) -> tuple[list[LoadReport], list[Measurement]]:
    """Separate the measurements of stages' starts, sorted by stage and time, from those of their calls."""
    loads, calls = [], []
    for call in trace:
        step, _, number = call.step.partition(" ")
        if step == LOAD:
            loads.append(LoadReport.model_validate(vars(call) | {"stage": int(number)}))
        else:
            calls.append(call)
    return sorted(loads, key=lambda load: (load.stage, load.started_s)), calls


def step_reports(
    calls: Sequence[Measurement], num_replicas: Mapping[str, int]
) -> tuple[list[StepReport], tuple[float, float]]:
    """Sum up the measurements of all steps of a run.

    `num_replicas` has the initial replicas of each step that has any; other steps count as one. Returns one report per
    step, in the order of the flow, and the window: Unix times of the first call and of the end of the last.
    """
    if not calls:
        return [], (0.0, 0.0)
    start_s = min(call.started_s for call in calls)
    stop_s = max(call.started_s + call.wall_s for call in calls)
    window = start_s, max(stop_s, start_s + 1e-9)
    by_step: dict[str, list[Measurement]] = {}
    for call in calls:
        by_step.setdefault(call.step, []).append(call)
    return [_step(name, by_step[name], window, num_replicas.get(name)) for name in sorted(by_step)], window


def _step(name: str, calls: list[Measurement], window: tuple[float, float], num_at_start: int | None) -> StepReport:
    names = ("num_calls", "num_rows", "wall_s", "cpu_s", "bytes_out", *FRAMES, *CUTS, *WAITED)
    sums = {each: sum(getattr(call, each) for call in calls) for each in names}
    replica_s = window[1] - window[0]
    line: list[tuple[float, int]] = []
    if num_at_start is not None:
        replica_s, line = replica_seconds(calls, window, num_at_start), timeline(calls, window[0])
    return StepReport(
        step=name,
        wall_share=sums["wall_s"] / replica_s,
        cpu_share=sums["cpu_s"] / replica_s,
        bytes_per_row=sums["bytes_out"] / sums["num_rows"] if sums["num_rows"] else 0.0,
        peak_rss_bytes=max(call.peak_rss_bytes for call in calls),
        replicas=tuple(line),
        notes=tuple(dict.fromkeys(call.note for call in calls if call.note)),
        **sums,
    )


def _spans(calls: Calls) -> list[tuple[float, float]]:
    found: dict[tuple[str, int], tuple[float, float]] = {}
    for call in calls:
        start_s, stop_s = call.started_s, call.started_s + call.wall_s
        first_s, last_s = found.get((call.node, call.pid), (start_s, stop_s))
        found[call.node, call.pid] = min(first_s, start_s), max(last_s, stop_s)
    return sorted(found.values())


def timeline(calls: Calls, begin_s: float) -> list[tuple[float, int]]:
    """Return (seconds since `begin_s`, number of working replicas) for each change of the number; it ends with 0."""
    changes: dict[float, int] = {}
    for start_s, stop_s in _spans(calls):
        changes[start_s] = changes.get(start_s, 0) + 1
        changes[stop_s] = changes.get(stop_s, 0) - 1
    number, line = 0, []
    for time_s, change in sorted(changes.items()):
        number += change
        line.append((round(time_s - begin_s, 2), number))
    return line


def replica_seconds(calls: Calls, window: tuple[float, float], num_at_start: int) -> float:
    """Sum the seconds available to all replicas of a step: the whole window for initial ones, else from their start.

    `window` are the Unix times of the first call of all steps and of the last one's end; `num_at_start` counts
    replicas that were started before the first call.
    """
    start_s, stop_s = window
    later = _spans(calls)[num_at_start:]
    return (stop_s - start_s) * num_at_start + sum(stop_s - first_s for first_s, _ in later)


def all_up_s(loads: Sequence[LoadReport]) -> float:
    """Return the Unix time at which every stage had loaded, from the loads of `split_loads`; 0 if unknown."""
    first_loads = {load.stage: load for load in reversed(loads)}.values()  # later replicas join a running run
    return max((load.started_s + load.wall_s for load in first_loads), default=0.0)


@dataclass(frozen=True)
class SteadyPart:
    """Part of a run in which all stages were up and blocks followed one another.

    It lasts `seconds`, from the end of the observed step's first call to that of its last; `rows_per_s` excludes the
    first. `steps` are sums in that time, extrapolated to all rows. `too_short` says why it permits no conclusions, else
    None.
    """

    seconds: float
    rows_per_s: float
    steps: tuple[StepReport, ...]
    too_short: str | None


def steady_part(
    calls: Sequence[Measurement], loads: Sequence[LoadReport], steps: Sequence[StepReport], observed: str
) -> SteadyPart:
    """Find the steady part of a run from the calls of one step that began once all stages were up.

    `observed` names that step: the last stage, or a slower step after it. `calls` are those of all steps, `loads` are
    of `split_loads`, and `steps` are sums over all calls.
    """
    start_s = all_up_s(loads)
    begun = [call for call in calls if call.started_s >= start_s]
    ends = sorted((call.started_s + call.wall_s, call.num_rows) for call in begun if call.step == observed)
    seconds = ends[-1][0] - ends[0][0] if ends else 0.0
    stages = {step.step: 0 for step in steps if step.step.startswith("stage")}
    inside = [call for call in begun if ends and ends[0][0] < call.started_s + call.wall_s <= ends[-1][0]]
    for call in inside:
        if call.step in stages:
            stages[call.step] += call.num_calls
    num_calls = min(stages.values(), default=0)
    too_short = None
    if seconds < MIN_STEADY_S or num_calls < MIN_STEADY_CALLS:
        too_short = (
            f"once all stages were up, the run lasted {duration_text(round(seconds))} and had "
            f"{plural(num_calls, 'block')} for each; {MIN_STEADY_S:.0f} s and {MIN_STEADY_CALLS} blocks are needed"
        )
    rows_per_s = sum(num_rows for _, num_rows in ends[1:]) / seconds if seconds else 0.0
    return SteadyPart(seconds, rows_per_s, tuple(_as_all(step, inside) for step in steps), too_short)


def _as_all(step: StepReport, calls: Calls) -> StepReport:
    """Scale the sums of a step as if all of its rows had taken as long as those of some calls."""
    own = [call for call in calls if call.step == step.step]
    num_rows = sum(call.num_rows for call in own)
    if not num_rows:
        return step
    scale = step.num_rows / num_rows
    sums = {"wall_s": scale * sum(call.wall_s for call in own), "cpu_s": scale * sum(call.cpu_s for call in own)}
    return step.model_copy(update=sums)


def cores_beside_steps(
    use: CpuUse, calls: Sequence[Measurement], loads: Sequence[LoadReport], stop_s: float
) -> float | None:
    """Return the CPU seconds per second that no step accounts for while all stages were up.

    `use` has the CPU seconds of all processes. The time before all `loads` (of `split_loads`) is left out, because
    importing libraries and loading weights is no running cost. `stop_s` is the Unix time of the last call's end.
    None if they were up for less than `MIN_UP_S`.
    """
    start_s = max(all_up_s(loads), min((call.started_s for call in calls), default=stop_s))
    if stop_s - start_s < MIN_UP_S:
        return None
    in_steps_s = sum(call.cpu_s for call in calls if call.started_s >= start_s)
    return max(use.between(start_s, stop_s) - in_steps_s, 0.0) / (stop_s - start_s)
