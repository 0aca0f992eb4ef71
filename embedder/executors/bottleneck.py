"""Operators of a run over time: which one the others wait for, and the most that each held. Pure.

In front of the narrowest operator blocks wait, and what comes after it waits for blocks. Those before it may be as busy
as it is, until Ray Data holds them back: so of several with blocks in front of them, the last one is the bottleneck.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it imports Ray, which a run in one process does without
    from embedder.compat.operator_stats import OperatorState, Sample

WINDOW_S = 20.0  # of what a run shows while it runs
MIN_WAITING = 0.5  # part of the time; blocks that arrive together wait for each other in front of any operator
MIN_BUSY = 0.5  # of the busiest one's share; what waits for a part file to fill is no bottleneck
MIN_WATCHED_S = 10.0  # for the bottleneck of a run
MIN_CALLS = 3  # with fewer that ended, the seconds inside calls are told too late
MAX_SAMPLES = 2000  # about an hour whole; of a longer run every second one is dropped, again and again


@dataclass(frozen=True)
class OperatorUse:
    """Use of one operator over some time.

    Attributes:
        name: of the operator.
        busy_share: part of the time of its replicas, or of as many tasks as ran at once, inside calls.
        waiting_share: part of the time in which blocks waited for it.
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
        """Return the peaks with one state more."""
        return OperatorPeaks(**{name: max(peak, getattr(state, name)) for name, peak in vars(self).items()})


@dataclass(frozen=True)
class OperatorView:
    """Operators of a run as it shows them: their last state, and the name of the bottleneck where one is known.

    `uses` are those of the last seconds; none until there are two samples.
    """

    operators: "tuple[OperatorState, ...]"
    bottleneck: str | None
    uses: tuple[OperatorUse, ...] = ()


def operator_cells(state: "OperatorState") -> tuple[str, ...]:
    """State of an operator, as one cell each: queue, tasks, replicas of a stage, CPUs, GPUs, bytes."""
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
    """Return whether every stage has a replica that computes."""
    stages = [state for state in sample.operators if state.name.startswith("stage")]
    return all(num_running(stage) for stage in stages)


def num_running(stage: "OperatorState") -> int:
    """Count the replicas of a stage that compute, or could."""
    return sum(not replica.is_restarting for replica in stage.replicas)


def operator_uses(samples: "Sequence[Sample]") -> list[OperatorUse]:
    """Sum up samples, each of which holds until the next one.

    Returns:
        One use for each operator, in the order of the flow; none where there are fewer than two samples.
    """
    if len(samples) < 2:
        return []
    lines = zip(*(sample.operators for sample in samples), strict=True)
    steps_s = [later.time_s - earlier.time_s for earlier, later in pairwise(samples)]
    return [_use(line, steps_s) for line in lines]


def _use(line: "tuple[OperatorState, ...]", steps_s: Sequence[float]) -> OperatorUse:
    most_tasks = max(1, *(state.num_tasks for state in line))
    # Tasks have no replicas: as many as once ran together could have done so all the time.
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
    """Name the operator that the others wait for; none where nothing worked."""
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
        """The samples so far, of a long run not all."""
        with self._lock:
            return tuple(self._samples)

    @property
    def peaks(self) -> dict[str, OperatorPeaks]:
        """The most that each operator held, by name."""
        with self._lock:
            return dict(self._peaks)

    def view(self) -> OperatorView | None:
        """Return what the run is to show now; none before the first sample."""
        samples = self.samples
        if not samples:
            return None
        last = samples[-1]
        recent = [sample for sample in _since_up(samples) if sample.time_s >= last.time_s - WINDOW_S]
        uses = tuple(operator_uses(recent))
        return OperatorView(last.operators, find_bottleneck(uses), uses)

    def uses(self) -> tuple[list[OperatorUse], str | None]:
        """Sum up the time from when all stages were up until the last operator ran dry.

        Returns:
            The operators, and the bottleneck; no bottleneck of less than `MIN_WATCHED_S`. Where the stages never were
            up together, the operators over the whole time.
        """
        samples = self.samples
        steady = [sample for sample in _since_up(samples) if _is_fed(sample)]
        uses = operator_uses(steady)
        is_long = len(steady) > 1 and steady[-1].time_s - steady[0].time_s >= MIN_WATCHED_S
        return uses or operator_uses(samples), find_bottleneck(uses) if is_long else None


def _since_up(samples: "Sequence[Sample]") -> "list[Sample]":
    """Leave out the samples before each stage was up once; one may be done, and gone, before a sample sees it up."""
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
