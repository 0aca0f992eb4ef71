"""A thread that watches a run: how far its journal has come, and how much memory its processes hold."""

import threading
from collections.abc import Callable

from embedder.run import machine
from embedder.store.journal import read_entry
from embedder.store.layout import journal_folder
from embedder.store.runs import Run

INTERVAL_S = 1.0

OnProgress = Callable[[int], None]
"""Told the number of items finished by this session, whenever it has grown."""


class RunMonitor:
    """Watches between entering and leaving the block."""

    def __init__(self, run: Run, on_progress: OnProgress) -> None:
        self.peak_memory_bytes = 0
        self._run, self._on_progress = run, on_progress
        self._seen: dict[str, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="monitor", daemon=True)

    def __enter__(self) -> "RunMonitor":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self._look()

    def _look(self) -> None:
        self.peak_memory_bytes = max(self.peak_memory_bytes, machine.process_tree_pss_bytes())
        folder = journal_folder(self._run.run_id)
        mine = [info.path for info in self._run.files.list(folder) if self._run.session in info.path]
        new = [path for path in mine if path not in self._seen]
        for path in new:
            self._seen[path] = read_entry(self._run.files, path).num_items
        if new:
            self._on_progress(sum(self._seen.values()))
