"""Operators of a run over time: the bottleneck, and the most that each held. Pure.

Blocks queue in front of the bottleneck, and operators after it wait for blocks. Those before it may be just as busy
until Ray Data holds them back. So of several operators with a queue, the last one is the bottleneck.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it imports Ray, which a run in one process doesn't need
    from embedder.compat.operator_stats import OperatorState, Sample

WINDOW_S = 20.0  # that a run shows while it runs
MIN_WAITING = 0.5  # share of the time; blocks that arrive together queue in front of any operator
MIN_BUSY = 0.5  # of the busiest one's share; an operator that waits for a part file to fill is no bottleneck
MIN_WATCHED_S = 10.0  # for the bottleneck of a run
MIN_CALLS = 3  # with fewer finished calls, the seconds inside calls are known too late
MAX_SAMPLES = 2000  # about an hour in full; for a longer run, every second sample is dropped repeatedly


@dataclass(frozen=True)
class OperatorUse:
    """Use of one operator over some time.

    `busy_share` is the share of its replicas' time (or of as many tasks as ran at once) inside calls, `waiting_share`
    the share of the time in which blocks waited for it.
    """

    name: str
    busy_share: float
    waiting_share: float


@dataclass(frozen=True)
class OperatorPeaks:
    """The most that one operator held."""

    queued_blocks: int = 0
    num_tasks: int = 0
    object_store_bytes: int = 0
    num_cpus: float = 0.0
    num_gpus: float = 0.0

    def with_state(self, state: "OperatorState") -> "OperatorPeaks":
        """Return the peaks including one more state."""
        return OperatorPeaks(**{name: max(peak, getattr(state, name)) for name, peak in vars(self).items()})


@dataclass(frozen=True)
class OperatorView:
    """Operators of a run for display: their last state, and the name of the bottleneck if known.

    `uses` are those of the last seconds; none until there are two samples.
    """

    operators: "tuple[OperatorState, ...]"
    bottleneck: str | None
    uses: tuple[OperatorUse, ...] = ()


def operator_cells(state: "OperatorState") -> tuple[str, ...]:
    """Return the state of an operator as cells: queue, tasks, replicas of a stage, CPUs, GPUs, bytes."""
    replicas = ""
    if state.name.startswith("stage"):
        starting = sum(replica.is_restarting for replica in state.replicas) + state.num_starting
        replicas = f"{num_running(state)}" + (f" (+{starting} starting)" if starting else "")
    size = f"{state.object_store_bytes / (1 << 20):,.1f} MiB"
    cells = (f"{state.queued_blocks:,}", f"{state.num_tasks:,}", replicas)
    return (*cells, f"{state.num_cpus:.3g}", f"{state.num_gpus:.3g}", size)


OPERATOR_COLUMNS = ("queue", "tasks", "replicas", "CPUs", "GPUs", "store")
"""Headings of `operator_cells`."""


def describe_operators(view: OperatorView) -> str:
    """Describe the operators of a run in one line."""
    operators = []
    for state in view.operators:
        named = zip(OPERATOR_COLUMNS, operator_cells(state), strict=True)
        operators.append(f"{state.name}: " + ", ".join(f"{name} {cell}" for name, cell in named if cell))
    return "; ".join([*operators, f"bottleneck: {view.bottleneck or 'not known yet'}"])


def is_up(sample: "Sample") -> bool:
    """Whether every stage has a replica that computes."""
    stages = [state for state in sample.operators if state.name.startswith("stage")]
    return all(num_running(stage) for stage in stages)


def num_running(stage: "OperatorState") -> int:
    """Count the replicas of a stage that compute, or could."""
    return sum(not replica.is_restarting for replica in stage.replicas)


def operator_uses(samples: "Sequence[Sample]") -> list[OperatorUse]:
    """Sum up samples, each of which holds until the next one.

    Returns one use per operator, in the order of the flow; none if there are fewer than two samples.
    """
    if len(samples) < 2:
        return []
    lines = zip(*(sample.operators for sample in samples), strict=True)
    steps_s = [later.time_s - earlier.time_s for earlier, later in pairwise(samples)]
    return [_use(line, steps_s) for line in lines]


def _use(line: "tuple[OperatorState, ...]", steps_s: Sequence[float]) -> OperatorUse:
    most_tasks = max(1, *(state.num_tasks for state in line))
    # Tasks have no replicas: as many as once ran together could have run all the time.
    slots = [num_running(state) if state.name.startswith("stage") else most_tasks for state in line]
    slot_s = occupied_s = waiting_s = 0.0
    for state, num_slots, step_s in zip(line, slots, steps_s, strict=False):
        slot_s += num_slots * step_s
        occupied_s += min(state.num_tasks, num_slots) * step_s
        waits = state.queued_blocks > 0 or (state.name.startswith("stage") and state.num_tasks > num_slots)
        waiting_s += waits * step_s
    num_calls = line[-1].num_calls - line[0].num_calls
    busy_s = line[-1].work_s - line[0].work_s if num_calls >= MIN_CALLS else occupied_s
    return OperatorUse(
        name=line[-1].name,
        busy_share=min(busy_s / slot_s, 1.0) if slot_s else 0.0,
        waiting_share=waiting_s / (sum(steps_s) or 1.0),
    )


def find_bottleneck(uses: Sequence[OperatorUse]) -> str | None:
    """Name the operator that the others wait for; None if nothing worked."""
    busiest = max(uses, key=lambda use: use.busy_share, default=None)
    if busiest is None or not busiest.busy_share:
        return None
    held_up = [
        use for use in uses if use.waiting_share >= MIN_WAITING and use.busy_share >= MIN_BUSY * busiest.busy_share
    ]
    return held_up[-1].name if held_up else busiest.name


class OperatorHistory:
    """Samples of a run's operators; one thread adds them, others read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._samples: list[Sample] = []
        self._peaks: dict[str, OperatorPeaks] = {}

    def add(self, sample: "Sample") -> None:
        """Add a sample, later than those before."""
        with self._lock:
            for state in sample.operators:
                self._peaks[state.name] = self._peaks.get(state.name, OperatorPeaks()).with_state(state)
            self._samples.append(sample)
            if len(self._samples) > MAX_SAMPLES:
                del self._samples[1:-1:2]

    @property
    def samples(self) -> "tuple[Sample, ...]":
        """The samples so far; of a long run, only some."""
        with self._lock:
            return tuple(self._samples)

    @property
    def peaks(self) -> dict[str, OperatorPeaks]:
        """The most that each operator held, by name."""
        with self._lock:
            return dict(self._peaks)

    def view(self) -> OperatorView | None:
        """Return what the run is to show now; None before the first sample."""
        samples = self.samples
        if not samples:
            return None
        last = samples[-1]
        recent = [sample for sample in _since_up(samples) if sample.time_s >= last.time_s - WINDOW_S]
        uses = tuple(operator_uses(recent))
        return OperatorView(last.operators, find_bottleneck(uses), uses)

    def uses(self) -> tuple[list[OperatorUse], str | None]:
        """Sum up the time from when all stages were up until the last operator ran dry.

        Returns the operators and the bottleneck, which is None for less than `MIN_WATCHED_S`. If the stages never were
        up together, the operators over the whole time.
        """
        samples = self.samples
        steady = [sample for sample in _since_up(samples) if _is_fed(sample)]
        uses = operator_uses(steady)
        is_long = len(steady) > 1 and steady[-1].time_s - steady[0].time_s >= MIN_WATCHED_S
        return uses or operator_uses(samples), find_bottleneck(uses) if is_long else None


def _since_up(samples: "Sequence[Sample]") -> "list[Sample]":
    """Leave out the samples before each stage was up once; a stage may be done before a sample sees it up."""
    seen: set[str] = set()
    for index, sample in enumerate(samples):
        stages = [state for state in sample.operators if state.name.startswith("stage")]
        seen.update(stage.name for stage in stages if num_running(stage) or stage.num_calls)
        if len(seen) == len(stages):
            return list(samples[index:])
    return []


def _is_fed(sample: "Sample") -> bool:
    """Whether any operator has work; a slow sink is the last that has."""
    return any(state.queued_blocks or state.num_tasks for state in sample.operators)
