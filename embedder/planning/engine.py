"""What Ray takes of the cores beside the steps: a part of a core all the time, and something for each call of a step.

A run's processes together take so much CPU, the steps' own measurements account for so much of it; the rest is Ray's
(daemons, the driver's scheduling, handing blocks over) and our monitor's. Each report says how much that was.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from embedder.store.files import StoreFiles
from embedder.store.layout import Record, read_record, run_file
from embedder.store.runs import REPORT_FILE, all_runs

# Taken on two cores of a cloud server (Ray 2.60) with scripts/compare_predictions.py, which prints what it finds.
ENGINE_CORES = 0.10
ENGINE_CALL_S = 0.012
ENGINE_START_S = 4.0
NUM_RUNS = 5  # of a store, the last ones
MIN_WINDOW_S = 20.0  # a shorter run says little: it is all start
MAX_FACTOR = 4.0  # an observation further off than this had something else in it


@dataclass(frozen=True)
class EngineShare:
    """Ray's share of the cores.

    Attributes:
        cores: CPU seconds a second, whatever is done.
        call_s: CPU seconds of one call of one step.
        start_s: CPU seconds of a run's processes of tasks, which start when the first of them is needed.
    """

    cores: float = ENGINE_CORES
    call_s: float = ENGINE_CALL_S
    start_s: float = ENGINE_START_S

    def seconds(self, window_s: float, num_calls: float) -> float:
        """CPU seconds of a run."""
        return self.cores * window_s + self.call_s * num_calls + self.start_s

    def per_item(self, item_s: float, calls_per_item: float, num_cores: float) -> float:
        """CPU seconds of one item on cores that are busy all the time, in a run so long that its start doesn't count.

        An item takes `item_s` beside Ray; with x items a second, x * (item_s + calls) + cores = num_cores.

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
    """What one run found: CPU seconds that no step accounts for, in a window of so many seconds and calls."""

    cpu_s: float
    window_s: float
    num_calls: int


class _StepRecord(Record):
    num_calls: int


class _ReportRecord(Record):
    """The part of a report that counts here; older ones lack some of it."""

    engine_cpu_s: float | None = None
    window_s: float = 0.0
    steps: tuple[_StepRecord, ...] = ()


def fitted(uses: Iterable[EngineUse], start: EngineShare | None = None) -> EngineShare:
    """Scale the usual share to what runs have found; all of its parts alike."""
    start = start or EngineShare()
    told = [use for use in uses if use.window_s >= MIN_WINDOW_S]
    expected_s = sum(start.seconds(use.window_s, use.num_calls) for use in told)
    if not expected_s:
        return start
    factor = min(max(sum(use.cpu_s for use in told) / expected_s, 1 / MAX_FACTOR), MAX_FACTOR)
    return EngineShare(start.cores * factor, start.call_s * factor, start.start_s * factor)


def engine_uses(store: str | None) -> list[EngineUse]:
    """What the last runs of a store found; nothing where there is no store yet."""
    if store is None:
        return []
    files = StoreFiles(store)
    found = []
    for run in all_runs(files)[-NUM_RUNS:]:
        report = read_record(files, run_file(run.run_id, REPORT_FILE), _ReportRecord)
        if report is not None and report.engine_cpu_s is not None:
            num_calls = sum(step.num_calls for step in report.steps)
            found.append(EngineUse(report.engine_cpu_s, report.window_s, num_calls))
    return found
