"""Ray's own CPU use beside the steps: a constant part of a core, and a part for each call of a step.

It is the CPU use of a run's processes without the part that the steps measure themselves: Ray's daemons, the driver's
scheduling, handing blocks over, and our monitor. Each report has the figure.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from embedder.store.files import StoreFiles
from embedder.store.layout import Record, read_record, run_file
from embedder.store.runs import REPORT_FILE, all_runs

# Taken on two cores of a cloud server (Ray 2.60) with scripts/compare_predictions.py, which prints them.
ENGINE_CORES = 0.12
ENGINE_CALL_S = 0.010
ENGINE_START_S = 5.0
NUM_RUNS = 5  # of a store, the last ones
MIN_WINDOW_S = 20.0  # a shorter run is mostly start
MAX_FACTOR = 4.0  # an observation further off than this has other causes


@dataclass(frozen=True)
class EngineShare:
    """Ray's share of the cores.

    Attributes:
        cores: constant CPU seconds per second.
        call_s: CPU seconds of one call of one step.
        start_s: CPU seconds of a run's decode and write processes, which start when they are first needed.
    """

    cores: float = ENGINE_CORES
    call_s: float = ENGINE_CALL_S
    start_s: float = ENGINE_START_S

    def at(self, calls_per_s: float, window_s: float) -> float:
        """CPU seconds per second of a run of `window_s` seconds with `calls_per_s` calls per second."""
        return self.cores + self.call_s * calls_per_s + self.start_s / window_s

    def per_item(self, item_s: float, calls_per_item: float, num_cores: float) -> float:
        """CPU seconds of one item on cores that are always busy, in a run so long that its start doesn't count.

        An item takes `item_s` beside Ray; with x items per second, x * (item_s + calls) + cores = num_cores.

        Args:
            item_s: CPU seconds of an item in all steps.
            calls_per_item: calls of all steps together for one item.
            num_cores: cores of the machine.
        """
        calls_s = self.call_s * calls_per_item
        items_per_s = max(num_cores - self.cores, 0.1 * num_cores) / (item_s + calls_s)
        return calls_s + self.cores / items_per_s


@dataclass(frozen=True)
class EngineUse:
    """Measurement of one run.

    Attributes:
        cores: CPU seconds per second that no step accounts for.
        calls_per_s: calls of steps per second.
        window_s: length of the run.
    """

    cores: float
    calls_per_s: float
    window_s: float


def fitted(uses: Iterable[EngineUse], start: EngineShare | None = None) -> EngineShare:
    """Scale the usual share, all of its parts alike, to the measurements of runs."""
    start, uses = start or EngineShare(), list(uses)
    if not uses:
        return start
    factor = sum(use.cores for use in uses) / sum(start.at(use.calls_per_s, use.window_s) for use in uses)
    factor = min(max(factor, 1 / MAX_FACTOR), MAX_FACTOR)
    return EngineShare(start.cores * factor, start.call_s * factor, start.start_s * factor)


class _StepRecord(Record):
    num_calls: int


class _ReportRecord(Record):
    """Fields of a report that are read here; older reports lack some of them."""

    engine_cores: float | None = None
    window_s: float = 0.0
    steps: tuple[_StepRecord, ...] = ()


def engine_uses(store: str | None) -> list[EngineUse]:
    """Measurements of the last runs of a store that were long enough; none without a store."""
    if store is None:
        return []
    files = StoreFiles(store)
    found = []
    for run in all_runs(files)[-NUM_RUNS:]:
        report = read_record(files, run_file(run.run_id, REPORT_FILE), _ReportRecord)
        if report is not None and report.engine_cores is not None and report.window_s >= MIN_WINDOW_S:
            num_calls = sum(step.num_calls for step in report.steps)
            found.append(EngineUse(report.engine_cores, num_calls / report.window_s, report.window_s))
    return found
