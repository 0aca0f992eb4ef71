"""Schema of a run's report, and sums over the measurements of its calls."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict

from embedder.report.plan_records import Review
from embedder.report.replica_timeline import replica_seconds, timeline
from embedder.store.layout import Kind
from embedder.store.step_metrics import LOAD


class StepReport(BaseModel):
    """One step: decode, stage 0, stage 1, ..., write."""

    model_config = ConfigDict(frozen=True)

    step: str
    num_calls: int
    num_rows: int
    wall_s: float
    cpu_s: float
    wall_share: float
    """Share of its time that one replica spent inside the step."""
    cpu_share: float
    """CPU seconds over the same time; above 1 where several threads or processes worked."""
    bytes_out: int
    bytes_per_row: float
    peak_rss_bytes: int
    replicas: tuple[tuple[float, int], ...] = ()
    """Of a stage: replicas that were at work, as (seconds since the first call, number) whenever it changed."""

    @property
    def max_replicas(self) -> int:
        """Largest number of replicas at work at once."""
        return max((number for _, number in self.replicas), default=1)


class LoadReport(BaseModel):
    """Start of one stage's process, which loads its shard and imports the libraries that this needs."""

    model_config = ConfigDict(frozen=True)

    stage: int
    pid: int
    started_s: float
    wall_s: float
    peak_rss_bytes: int


class PlaceReport(BaseModel):
    """Device that a stage computed on, and resources that each of its replicas reserved."""

    model_config = ConfigDict(frozen=True)

    stage: int
    device: str
    """Of torch: cpu or cuda."""
    num_cpus: float
    num_gpus: float
    num_threads: int


class Report(BaseModel):
    """`runs/<run_id>/report.json`; by default of a command that made no run."""

    model_config = ConfigDict(frozen=True)

    kind: Kind = "embed"
    run_id: str | None = None
    """None where there was nothing to do: then there is no run."""
    engine: str = "none"
    engine_reason: str = "nothing to embed"
    published: bool = False
    outcome: str = ""
    held: bool = False
    """A rollback holds the store, so nothing was done."""
    started_at: datetime
    wall_s: float
    startup_s: float = 0.0
    """From the command to the first row inside a step."""
    num_new: int = 0
    num_changed: int = 0
    num_unchanged: int = 0
    """Listed items that were not touched: published, or finished by an earlier session of the run."""
    reasons: dict[str, int] = {}
    """Items that were to be embedded, by the reason."""
    num_retired: int = 0
    """Items that left the store, because they are not listed any more."""
    num_taken_over: int = 0
    """Items that were not computed, as a publication that was rolled back from holds them."""
    taken_from: dict[str, int] = {}
    """Those by the run whose publication that was."""
    num_equal: int = 0
    """Items whose size or time differed and whose content did not: their vectors stay, and no model saw them."""
    num_stale: int = 0
    """Items that can't be read any more and keep their old vectors."""
    num_left: int = 0
    """Items that a limit left for the next refresh."""
    other_files: dict[str, int] = {}
    """Files of the sources that are no media, by suffix; none of them is an item."""
    unreadable: dict[str, int] = {}
    """Images and clips of kinds that this version can't read, by kind."""
    num_other_files: int = 0
    num_unreadable: int = 0
    num_junk: int = 0
    """Names that systems and programs leave behind; a folder of them counts as one."""
    num_sidecars: int = 0
    """Files that belong to an item and are no caption."""
    num_excluded: int = 0
    """Names that match `exclude`, or don't match `include`."""
    guards: tuple[dict[str, Any], ...] = ()
    """Verdict of each guard, and whether it was overridden."""
    num_items: int = 0
    """Items finished by this session and those before it in the same run."""
    num_rejected: int = 0
    num_vectors: int = 0
    items_per_s: float = 0.0
    """Items of this session over its steady window, start-up left out."""
    window_s: float = 0.0
    """From the first call of a step to the end of the last."""
    engine_cores: float | None = None
    """CPU seconds a second that no step accounts for, once all stages were up: Ray's own; none on a cluster."""
    peak_memory_bytes: int = 0
    """Memory of all processes of the run on this machine, each shared page counted once (PSS)."""
    steps: tuple[StepReport, ...] = ()
    loads: tuple[LoadReport, ...] = ()
    """When each stage's process read its weights; on Ray they start together, so these overlap."""
    places: tuple[PlaceReport, ...] = ()
    """By stage."""
    plan: list[dict[str, Any]] = []
    review: Review | None = None
    """The run against its plan; on Ray only."""
    versions: dict[str, str]

    @property
    def reject_fraction(self) -> float:
        """Rejected items over finished items."""
        return self.num_rejected / self.num_items if self.num_items else 0.0


def split_loads(trace: Iterable[dict[str, Any]]) -> tuple[list[LoadReport], list[dict[str, Any]]]:
    """Separate the measurements of stages' starts from those of their calls."""
    loads, calls = [], []
    for call in trace:
        step, _, number = call["step"].partition(" ")
        if step == LOAD:
            known = {name: call[name] for name in ("pid", "started_s", "wall_s", "peak_rss_bytes")}
            loads.append(LoadReport(stage=int(number), **known))
        else:
            calls.append(call)
    return sorted(loads, key=lambda load: (load.stage, load.started_s)), calls


def first_loads(loads: Iterable[LoadReport]) -> list[LoadReport]:
    """Find the start of each stage's first process; later ones join a run under way."""
    found: dict[int, LoadReport] = {}
    for load in loads:
        if load.stage not in found or load.started_s < found[load.stage].started_s:
            found[load.stage] = load
    return list(found.values())


def step_reports(
    trace: Iterable[dict[str, Any]], num_replicas: Mapping[str, int]
) -> tuple[list[StepReport], tuple[float, float]]:
    """Sum up the measurements of a run.

    Args:
        trace: `embedder.store.step_metrics.Measurement` values.
        num_replicas: replicas from the start, of each step that has replicas; other steps count as one.

    Returns:
        One report a step, in the order of the flow, and the window: Unix times of the first call and of the last's end.
    """
    calls = list(trace)
    if not calls:
        return [], (0.0, 0.0)
    start_s = min(call["started_s"] for call in calls)
    stop_s = max(call["started_s"] + call["wall_s"] for call in calls)
    window = start_s, max(stop_s, start_s + 1e-9)
    by_step: dict[str, list[dict[str, Any]]] = {}
    for call in calls:
        by_step.setdefault(call["step"], []).append(call)
    return [_step(name, by_step[name], window, num_replicas.get(name)) for name in sorted(by_step)], window


def _step(name: str, calls: list[dict[str, Any]], window: tuple[float, float], num_at_start: int | None) -> StepReport:
    sums = {key: sum(call[key] for call in calls) for key in ("num_rows", "wall_s", "cpu_s", "bytes_out")}
    replica_s = window[1] - window[0]
    line: list[tuple[float, int]] = []
    if num_at_start is not None:
        replica_s, line = replica_seconds(calls, window, num_at_start), timeline(calls, window[0])
    return StepReport(
        step=name,
        num_calls=len(calls),
        wall_share=sums["wall_s"] / replica_s,
        cpu_share=sums["cpu_s"] / replica_s,
        bytes_per_row=sums["bytes_out"] / sums["num_rows"],
        peak_rss_bytes=max(call["peak_rss_bytes"] for call in calls),
        replicas=tuple(line),
        **sums,
    )
