"""Monitor of a run in its own thread: progress, operators, events, and memory and CPU seconds of all processes."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import numpy as np
import psutil

from embedder.errors import StoreError
from embedder.executors.bottleneck import OperatorHistory
from embedder.executors.fleet_watch import FleetWatch
from embedder.executors.progress import show_entry, show_operators
from embedder.placement import hardware
from embedder.store.journal.journal import JournalEntry, read_entry
from embedder.store.journal.journal_segments import MIN_ENTRIES, list_journal, seal
from embedder.store.journal.runs import Run
from embedder.store.layout import read_record
from embedder.store.store_errors import StoreUnavailableError

LOG = logging.getLogger(__name__)
INTERVAL_S = 1.0
OPERATORS_INTERVAL_S = 2.0
PROCESSES_INTERVAL_S = 4.0  # finding all descendants and reading their clocks takes 20 ms
BUCKET_INTERVAL_S = 5.0  # a listing and each new entry in it cost requests
# The kernel walks all pages to find the shared ones: 25 ms per GiB, 0.15 s for a run of three stages. Read every
# second, that would take a fourteenth of two cores.
MEMORY_SHARE = 0.01  # of one core, for reading memory

Identity = tuple[int, float]  # process id and start time: ids are reused
OnProgress = Callable[[int], None]
"""Takes the number of items finished by this session, whenever it has grown."""


class CpuUse:
    """Sum of the CPU seconds of processes, including those that have ended since the last reading.

    Each earlier reading in `totals` has its Unix time, and the CPU seconds up to then.
    """

    def __init__(self, totals: Iterable[tuple[float, float]] = ()) -> None:
        self._seconds: dict[Identity, float] = {}
        self._totals = list(totals)

    def look(self, processes: Iterable[psutil.Process]) -> None:
        """Read the clocks of all processes; one that lives between two readings may be missed."""
        for process in processes:
            try:
                times = process.cpu_times()
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            self._seconds[process.pid, process.create_time()] = times.user + times.system
        self._totals.append((time.time(), sum(self._seconds.values())))

    def between(self, start_s: float, stop_s: float) -> float:
        """Return the CPU seconds between two Unix times, interpolated between the readings; 0 before two readings."""
        if not self._totals:
            return 0.0
        times_s, totals_s = np.array(self._totals).T
        at_start, at_stop = np.interp([start_s, stop_s], times_s, totals_s)
        return max(float(at_stop - at_start), 0.0)


class PeakMemory:
    """Peak memory of all processes together, read as often as is cheap; for one thread.

    `num_bytes` is the peak so far, each shared page counted once (PSS).
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._next_s = 0.0

    def look(self, processes: Iterable[psutil.Process], *, now: bool = False) -> None:
        """Read the memory if it is due."""
        if not now and time.monotonic() < self._next_s:
            return
        started_s = time.thread_time()
        self.num_bytes = max(self.num_bytes, self._read(processes))
        self._next_s = time.monotonic() + (time.thread_time() - started_s) / MEMORY_SHARE

    def _read(self, processes: Iterable[psutil.Process]) -> int:
        return hardware.pss_bytes(processes)


class RunMonitor:
    """Monitor of a run between entering and leaving the block; measures this process and its descendants."""

    def __init__(
        self,
        run: Run,
        on_progress: OnProgress,
        operators: OperatorHistory | None = None,
        fleet: FleetWatch | None = None,
        further: Sequence[Run] = (),
    ) -> None:
        """Make a monitor that is not running yet.

        It reads the journal of `run`. `on_progress` also shows the operators if it is an `OperatorDisplay`. `operators`
        and `fleet`, whose events are logged as they come, belong to a run on Ray. `further` has the run of each further
        model.
        """
        self.peak_memory = PeakMemory()
        self.cpu_use = CpuUse()
        self._run, self._on_progress = run, on_progress
        self._operators, self._fleet, self._further = operators, fleet, further
        self._num_logged = self._num_items = 0
        self._done = bytearray()  # whether each write task, by number, has finished
        self._next_journal_s = self._next_processes_s = self._next_operators_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="monitor", daemon=True)

    def __enter__(self) -> "RunMonitor":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._next_journal_s = 0.0
        self._look(at_end=True)

    def _watch(self) -> None:
        asked_to_stop = False
        while not self._stop.wait(INTERVAL_S):
            if self._run.is_lost and not asked_to_stop:
                asked_to_stop = True
                with suppress(StoreError, StoreUnavailableError):
                    self._run.request_stop()  # tasks on other machines don't know of it
            self._look()

    def _look(self, *, at_end: bool = False) -> None:
        if at_end or time.monotonic() >= self._next_processes_s:
            self._next_processes_s = time.monotonic() + PROCESSES_INTERVAL_S
            processes = hardware.process_tree()
            self.cpu_use.look(processes)
            self.peak_memory.look(processes, now=at_end)
        self._tell_events()
        if not at_end and time.monotonic() >= self._next_operators_s:
            self._next_operators_s = time.monotonic() + OPERATORS_INTERVAL_S
            self._show_operators()
        if time.monotonic() < self._next_journal_s:
            return
        if self._run.files.folder is None:
            self._next_journal_s = time.monotonic() + BUCKET_INTERVAL_S
        with suppress(StoreError, StoreUnavailableError):  # only progress is read here; the run itself reports errors
            self._look_at_journal()

    def _tell_events(self) -> None:
        events = self._fleet.events if self._fleet is not None else []
        for event in events[self._num_logged :]:
            LOG.info(event.text)
            self._num_logged += 1

    def _show_operators(self) -> None:
        view = self._operators.view() if self._operators is not None else None
        if view is not None:
            show_operators(self._on_progress, view)

    def _look_at_journal(self) -> None:
        """Count what is finished; a task by the model that needed most of its items. Its main entry comes last."""
        files, run_id, session = self._run.files, self._run.run_id, f"{self._run.session}-"
        mine = {name: path for name, path in list_journal(files, run_id).entries.items() if name.startswith(session)}
        new = [(name, path) for name, path in mine.items() if not self._is_done(_task(name))]
        entries = files.stream(lambda path: read_entry(files, path), [path for _, path in new])
        for (name, path), entry in zip(new, entries, strict=True):
            others = (read_record(each.files, path, JournalEntry) for each in self._further)
            self._num_items += max(each.num_items for each in (entry, *others) if each is not None)
            self._done[_task(name)] = True
            show_entry(self._on_progress, entry)
        if new:
            self._on_progress(self._num_items)
        if len(mine) >= MIN_ENTRIES and not self._run.is_lost:
            for run in (self._run, *self._further):
                seal(run.files, run_id, mine)

    def _is_done(self, task: int) -> bool:
        """Whether a write task was counted; one that restarts after its entry was sealed writes another."""
        self._done.extend(bytes(max(0, task + 1 - len(self._done))))
        return bool(self._done[task])


def _task(name: str) -> int:
    return int(name.rpartition("-")[2])
