"""Runs that are asked to stop: signals at a chosen moment, what is said, and what was kept."""

import json
import logging
import signal
import threading
import time
from pathlib import Path

from embedder.store.files import StoreFiles
from embedder.store.journal.runs import all_runs


class Listening(logging.Handler):
    """Handler that keeps the messages, and whether the run's tasks had been asked to stop by then."""

    def __init__(self, store):
        super().__init__()
        self.said, self.asked = [], []
        self._store = Path(store)

    def emit(self, record):
        self.said.append(record.getMessage())
        self.asked.append(bool(list(self._store.glob("runs/*/STOP-*"))))


def press(number=signal.SIGINT, times=1):
    """Send the signal to the main thread: any other would take it without waking that one from a wait."""
    for _ in range(times):
        signal.pthread_kill(threading.main_thread().ident, number)


def once(monkeypatch, owner, name, do, when=lambda *args, **options: True):
    """Do something before the first call of a function for which `when` holds."""
    original = getattr(owner, name)
    left = [do]

    def call(*args, **options):
        if left and when(*args, **options):
            left.pop()()
        return original(*args, **options)

    monkeypatch.setattr(owner, name, call)


def num_kept(config):
    files = StoreFiles(config.store)
    return sum(entry["num_items"] for run in all_runs(files) for entry in entries_of(config, run.run_id))


def entries_of(config, run_id):
    folder = Path(config.store) / "runs" / run_id / "journal"
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def wait_until(is_so):
    deadline_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
