"""A thread that watches a run: how far its journal has come, what memory its processes hold, what CPU they take."""

import threading
import time
from collections.abc import Callable

from embedder.run import machine
from embedder.run.cpu_use import CpuUse
from embedder.store.journal import read_entry
from embedder.store.layout import journal_folder
from embedder.store.runs import Run

INTERVAL_S = 1.0
# The kernel walks all pages to tell what memory is shared: 25 ms for each GiB, 0.15 s for a run of three stages. Looked
# at each second, that would be a fourteenth of two cores.
MEMORY_SHARE = 0.02

OnProgress = Callable[[int], None]
"""Told the number of items finished by this session, whenever it has grown."""


class RunMonitor:
    """Watches between entering and leaving the block."""

    def __init__(self, run: Run, on_progress: OnProgress) -> None:
        self.peak_memory_bytes = 0
        self.cpu_use = CpuUse()
        self._run, self._on_progress = run, on_progress
        self._seen: dict[str, int] = {}
        self._next_memory_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="monitor", daemon=True)

    def __enter__(self) -> "RunMonitor":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()
        self._look_at_memory()

    def _watch(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self._look()
            if time.monotonic() >= self._next_memory_s:
                self._look_at_memory()

    def _look(self) -> None:
        self.cpu_use.look(machine.process_tree())
        folder = journal_folder(self._run.run_id)
        mine = [info.path for info in self._run.files.list(folder) if self._run.session in info.path]
        new = [path for path in mine if path not in self._seen]
        for path in new:
            self._seen[path] = read_entry(self._run.files, path).num_items
        if new:
            self._on_progress(sum(self._seen.values()))

    def _look_at_memory(self) -> None:
        started_s = time.thread_time()
        self.peak_memory_bytes = max(self.peak_memory_bytes, machine.pss_bytes(machine.process_tree()))
        self._next_memory_s = time.monotonic() + (time.thread_time() - started_s) / MEMORY_SHARE
