"""One run as its operators see it: wraps the flow, and tells its end to the log, the metrics and whoever is on call.

    with operation(config, "refresh", watcher) as run_log:
        run_log.begun(run)          # once there is a run: its folder takes the log
        run_log.say("publishing")   # to the terminal and the log
        run_log.reported(report)    # whatever the outcome

Nothing here fails a run: what can't be written is said on the terminal.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from embedder.config import RunConfig
from embedder.engine.interrupts import SignalInterrupt
from embedder.engine.progress import RunWatcher
from embedder.errors import USER_MISTAKES
from embedder.observability.log import UNWRITABLE, RunLog
from embedder.observability.metrics import write_metrics
from embedder.observability.notify import notify_failure
from embedder.observability.redaction import mask
from embedder.observability.summary import summarise
from embedder.store.files import StoreFiles
from embedder.store.layout import CURRENT_FILE, STORE_FILE, read_current, run_file, utc_now
from embedder.store.runs import RUN_FILE, Run

LOG_FILE = "log.txt"
RUNS_FILE = "runs.jsonl"
USER_MISTAKE = 2  # the exit code
PROGRESS_S = 60.0  # between two lines of progress


class RunObserver:
    """Watches a run for its operators, and hands on what it sees to a display."""

    def __init__(self, config: RunConfig, kind: str, watcher: RunWatcher) -> None:
        self.config, self.kind = config, kind
        self.started_at = utc_now()
        self.report: dict[str, Any] | None = None
        self._run: Run | None = None
        self._watcher = watcher
        self._log = RunLog(Path(config.log_file).expanduser() if config.log_file else None)

    def say(self, message: str) -> None:
        """One line, for the display and the log."""
        self._watcher.say(mask(message))
        self._log.add(message)

    @contextmanager
    def progress(self, num_items: int) -> Iterator[Callable[[int], None]]:
        """Progress on the display, and a line in the log each minute."""
        started_s, next_s = time.monotonic(), time.monotonic() + PROGRESS_S
        with self._watcher.progress(num_items) as show:

            def on_progress(num_done: int) -> None:
                nonlocal next_s
                show(num_done)
                now_s = time.monotonic()
                if now_s >= next_s:
                    next_s = now_s + PROGRESS_S
                    self._log.add(f"{num_done:,} of {num_items:,} items, {num_done / (now_s - started_s):.1f} items/s")

            yield on_progress

    def begun(self, run: Run) -> None:
        """There is a run: its folder takes the log, unless `log_file` says otherwise."""
        self._run = run
        path = run_file(run.run_id, LOG_FILE)

        def write(lines: str) -> None:
            earlier = run.files.read(path) if run.files.exists(path) else b""
            run.files.write(path, earlier + lines.encode())

        self._log.write_to(write)
        self._log.add(f"{self.kind}: run {run.run_id}, session {run.session}")

    def reported(self, report: BaseModel) -> None:
        """The run's report, published or not."""
        self.report = report.model_dump(mode="json")

    def ended(self, exit_code: int, message: str) -> None:
        """Write the run's last words to all who wait for them; never raises what a full or missing disk raises."""
        if self._run is not None and not self._run.files.exists(run_file(self._run.run_id, RUN_FILE)):
            self._log.write_to(lambda lines: None)  # the command was refused, and took its run away
        summary = self._summary(exit_code, message)
        self._log.add(f"exit {exit_code}: {message} ({summary['wall_s']:.1f} s)")
        self._attempt("the line of this run", lambda: self._append_line(summary))
        if self.config.metrics_file:
            path = Path(self.config.metrics_file).expanduser()
            self._attempt(f"metrics_file {path}", lambda: write_metrics(path, summary))
        if exit_code != 0:
            notify_failure(self.config.on_failure, summary, self.say)
        if self._log.problem:
            self._watcher.say(self._log.problem)

    def _summary(self, exit_code: int, message: str) -> dict[str, Any]:
        times = (self.started_at, utc_now())
        store = self.config.store or ""
        return summarise(self.kind, store, exit_code, message, times, self.report, self._published_at())

    def _published_at(self) -> datetime | None:
        """When what readers see was published; none where that can't be told."""
        if self.config.store is None:
            return None
        try:
            files = StoreFiles(self.config.store)
            current = read_current(files) if files.exists(CURRENT_FILE) else None  # reading alone makes the folder
        except UNWRITABLE:
            return None
        return current.published_at if current else None

    def _append_line(self, summary: dict[str, Any]) -> None:
        """One line more, in one write, so that two runs that end together don't mix theirs."""
        path = self._runs_file(is_refusal=summary["exit_code"] == USER_MISTAKE)
        if path is None:
            return
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, (json.dumps(summary) + "\n").encode())
        finally:
            os.close(handle)

    def _runs_file(self, *, is_refusal: bool) -> Path | None:
        """`runs_file`, or a file in a local store, which a refusal leaves as it is; object stores can't append."""
        if self.config.runs_file:
            path = Path(self.config.runs_file).expanduser()
            path.parent.mkdir(parents=True, exist_ok=True)
            return path
        if self.config.store is None or is_refusal:
            return None
        folder = StoreFiles(self.config.store).folder
        return folder / RUNS_FILE if folder is not None and (folder / STORE_FILE).is_file() else None

    def _attempt(self, what: str, do: Callable[[], None]) -> None:
        try:
            do()
        except UNWRITABLE as error:
            reason = getattr(error, "strerror", None) or type(error).__name__
            self.say(f"{what} can't be written ({reason}); check the path, its rights and the space on its disk")


@contextmanager
def operation(config: RunConfig, kind: str, watcher: RunWatcher) -> Iterator[RunObserver]:
    """Watch the block for the run's operators, and tell them how it ended; its error goes on to the caller."""
    watched = RunObserver(config, kind, watcher)
    try:
        yield watched
    except USER_MISTAKES as error:
        watched.ended(USER_MISTAKE, str(error))
        raise
    except SignalInterrupt as error:
        error.message += "; what is finished is kept, and the same command goes on"
        watched.ended(error.exit_code, error.message)
        raise
    except BaseException as error:
        watched.ended(1, str(error) or type(error).__name__)
        raise
    watched.ended(0, str((watched.report or {}).get("outcome") or "done"))
