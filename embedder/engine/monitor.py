"""A thread that watches a run: how far its journal has come, what memory its processes hold, what CPU they take."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from embedder.engine import hardware
from embedder.engine.cpu_use import CpuUse
from embedder.engine.peak_memory import PeakMemory
from embedder.errors import StoreError
from embedder.store.errors import StoreUnavailableError
from embedder.store.journal import read_entry
from embedder.store.layout import journal_folder
from embedder.store.runs import Run

INTERVAL_S = 1.0
PROCESSES_INTERVAL_S = 4.0  # to find all descendants and read their clocks takes 20 ms
BUCKET_INTERVAL_S = 5.0  # a listing and what is new in it are requests

OnProgress = Callable[[int], None]
"""Told the number of items finished by this session, whenever it has grown."""


class RunMonitor:
    """Watches between entering and leaving the block."""

    def __init__(self, run: Run, on_progress: OnProgress) -> None:
        self.peak_memory = PeakMemory()
        self.cpu_use = CpuUse()
        self._run, self._on_progress = run, on_progress
        self._seen: dict[str, int] = {}
        self._next_journal_s = self._next_processes_s = 0.0
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
        if time.monotonic() < self._next_journal_s:
            return
        if self._run.files.folder is None:
            self._next_journal_s = time.monotonic() + BUCKET_INTERVAL_S
        with suppress(StoreError, StoreUnavailableError):  # only progress is read here; who needs the store hears of it
            self._look_at_journal()

    def _look_at_journal(self) -> None:
        folder = journal_folder(self._run.run_id)
        paths = (info.path for info in self._run.files.list(folder))
        mine = [path for path in paths if self._run.session in path and path.endswith(".json")]
        new = [path for path in mine if path not in self._seen]
        for path in new:
            self._seen[path] = read_entry(self._run.files, path).num_items
        if new:
            self._on_progress(sum(self._seen.values()))
