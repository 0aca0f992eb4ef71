"""One run as its operators see it: its log, its line in `runs.jsonl`, its metrics, and a notification if it fails.

    with observe_run(config.observing, "refresh", show_progress) as observer:
        observer.on_run(run)          # once there is a run: its folder takes the log
        observer.on_report(report)    # whatever the outcome

The run's log receives all messages that the product logs meanwhile. No failure here fails a run: what can't be written
is logged, for the terminal.
"""

import errno
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from embedder.config import ObserveSettings
from embedder.errors import USER_MISTAKES
from embedder.executors.bottleneck import OperatorView, describe_operators
from embedder.executors.interrupts import SignalInterrupt
from embedder.executors.progress import ShowProgress, no_progress, show_entry, show_operators
from embedder.observability.live_metrics import LiveMetrics, answering
from embedder.observability.log import UNWRITABLE, RunLog, messages_to
from embedder.observability.metrics import write_metrics
from embedder.observability.notify import notify_failure
from embedder.observability.run_summary import summarise
from embedder.observability.run_tracking import RunTracking
from embedder.observability.traces import RunTraces, trace_run
from embedder.observability.trackers import Tracker, track_run
from embedder.quantities import duration_text, plural, rate
from embedder.store.files import StoreFiles
from embedder.store.journal.journal import JournalEntry
from embedder.store.journal.runs import RUN_FILE, Run
from embedder.store.layout import STORE_FILE, Kind, read_current, run_file, utc_now

LOG = logging.getLogger(__name__)
LOG_FILE = "log.txt"
RUNS_FILE = "runs.jsonl"
USER_MISTAKE = 2  # the exit code
PROGRESS_S = 60.0  # between two lines of progress
GOES_ON = "; what is finished is kept, and the same command continues"


class RunObserver:
    """Observer of a run for its operators.

    `live` has metrics of the running command, `traces` spans of its phases, and `tracking` feeds its tracker. The Unix
    time `started_s` of the start is the monotonic time `began_s`.
    """

    def __init__(self, settings: ObserveSettings, kind: Kind, show_progress: ShowProgress) -> None:
        """Start observing, and take the time; `settings` say where its log, line and metrics go."""
        self.settings, self.kind = settings, kind
        self.started_at = utc_now()
        self.started_s, self.began_s = time.time(), time.monotonic()
        self.report: dict[str, Any] | None = None
        self.live = LiveMetrics(settings.store, kind, self.started_s)
        self.traces = RunTraces()
        self.tracking = RunTracking(Tracker(), settings, kind)
        self._run: Run | None = None
        self._has_ended = False
        self._show_progress = show_progress
        self.log = RunLog(Path(settings.log_file).expanduser() if settings.log_file else None)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the command's start."""
        return time.monotonic() - self.began_s

    @contextmanager
    def progress(self, num_items: int) -> Iterator[Callable[[int], None]]:
        """Show progress on the display, and write a line to the log from time to time."""
        self.live.on_listed(num_items)
        try:
            with self._show_progress(num_items) as show:
                yield _ObservedProgress(show, self, num_items)
        finally:
            self.live.engine_ended()

    def on_run(self, run: Run) -> None:
        """Write the log to the run's folder from now on, unless `log_file` says otherwise.

        A bucket can't append, so each line rewrites the whole log. It is read only once, as the command holds the store
        until the run ends and nobody else writes to it.
        """
        self._run = run
        self.traces.describe(run_id=run.run_id, session=run.session)
        path = run_file(run.run_id, LOG_FILE)
        text: bytes | None = None

        def write(lines: str) -> None:
            nonlocal text
            if text is None or self._has_ended:  # a purge may have changed it since the end
                text = run.files.read(path) if run.files.exists(path) else b""
            text += lines.encode()
            run.files.write(path, text)

        self.log.write_to(write)
        self.log.add(f"{self.kind}: run {run.run_id}, session {run.session}")
        self.tracking.on_run(run)

    def on_report(self, report: BaseModel) -> None:
        """Keep the run's report, published or not, for the summary."""
        self.report = report.model_dump(mode="json")

    def on_lost(self, reason: str) -> None:
        """Report a run whose process ends at once, without an error that would reach `observe_run`."""
        if not self._has_ended:
            self.on_end(1, reason + (GOES_ON if self._run is not None else ""))

    def add_prospect(self, error: BaseException) -> None:
        """Add to an error's message that the run can be resumed from what it has finished, if there is such a run."""
        if self._run is not None and getattr(error, "is_resumable", False):
            error.args = (f"{error}{GOES_ON}",)
        elif self._run is None and isinstance(error, SignalInterrupt):
            error.args = (f"{error} before anything was embedded",)

    def on_end(self, exit_code: int, message: str) -> None:
        """Write the end of the run to the log, the runs file and the metrics; after a failure, send notifications.

        Errors of a full or missing disk are logged, not raised.
        """
        self._has_ended = True
        if self._run is not None and not self._run.files.exists(run_file(self._run.run_id, RUN_FILE)):
            self.log.write_to(lambda lines: None)  # the command was refused, and has removed its run
        times, store = (self.started_at, utc_now()), self.settings.store or ""
        wall_s = self.elapsed_s
        summary = summarise(self.kind, store, exit_code, message, times, wall_s, self.report, self._published_at())
        self.log.add(f"exit {exit_code}: {message} ({duration_text(wall_s)})")
        self.tracking.on_end(summary)
        self._attempt("the line of this run", lambda: self._append_line(summary))
        if self.settings.metrics_file:
            path = Path(self.settings.metrics_file).expanduser()
            self._attempt(f"metrics_file {path}", lambda: write_metrics(path, summary))
        if exit_code != 0:
            notify_failure(self.settings.on_failure, summary)
        if self.log.problem:
            LOG.warning(self.log.problem)

    def _published_at(self) -> datetime | None:
        if self.settings.store is None:
            return None
        try:
            current = read_current(StoreFiles(self.settings.store))
        except UNWRITABLE:
            return None
        return current.published_at if current else None

    def _append_line(self, summary: dict[str, Any]) -> None:
        """Append one line in one write, so that the lines of two runs that end together don't mix.

        Raises an OSError if the disk takes only a part of it, which is removed: the next line would follow it directly.
        """
        path = self._runs_file(is_refusal=summary["exit_code"] == USER_MISTAKE)
        if path is None:
            return
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            line = (json.dumps(summary) + "\n").encode()
            written = os.write(handle, line)
            if written < len(line):
                os.ftruncate(handle, os.fstat(handle).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(handle)

    def _runs_file(self, *, is_refusal: bool) -> Path | None:
        """Return the path of `runs_file`, or of a file in a local store (not after a refusal); buckets can't append."""
        if self.settings.runs_file:
            path = Path(self.settings.runs_file).expanduser()
            path.parent.mkdir(parents=True, exist_ok=True)
            return path
        if self.settings.store is None or is_refusal:
            return None
        folder = StoreFiles(self.settings.store).folder
        return folder / RUNS_FILE if folder is not None and (folder / STORE_FILE).is_file() else None

    def _attempt(self, what: str, do: Callable[[], None]) -> None:
        try:
            do()
        except UNWRITABLE as error:
            reason = getattr(error, "strerror", None) or error
            LOG.warning(f"{what} can't be written ({reason}); check the path, its rights and the space on its disk")


class _ObservedProgress:
    """Display of the progress that also feeds metrics and traces, and the log from time to time.

    An `OperatorDisplay` and a `JournalDisplay`.
    """

    def __init__(self, show: Callable[[int], None], observer: RunObserver, num_items: int) -> None:
        self._show, self._log, self._observer = show, observer.log, observer
        self._num_items, self._started_s = num_items, time.monotonic()
        self._next_s = self._next_operators_s = self._started_s + PROGRESS_S

    def __call__(self, num_done: int) -> None:
        self._show(num_done)
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + PROGRESS_S
            per_s = num_done / (now_s - self._started_s)
            self._log.add(f"{num_done:,} of {plural(self._num_items, 'item')}, {rate(per_s)}")

    def show_entry(self, entry: JournalEntry) -> None:
        show_entry(self._show, entry)
        self._observer.live.on_entry(entry)
        self._observer.traces.on_entry(entry)
        self._observer.tracking.on_entry(entry)

    def show_operators(self, view: OperatorView) -> None:
        show_operators(self._show, view)
        self._observer.live.operators(view)
        now_s = time.monotonic()
        if now_s >= self._next_operators_s:
            self._next_operators_s = now_s + PROGRESS_S
            self._log.add(describe_operators(view))


@contextmanager
def observe_run(
    settings: ObserveSettings, kind: Kind, show_progress: ShowProgress = no_progress
) -> Iterator[RunObserver]:
    """Observe the block for the run's operators, and report how it ended; its error propagates to the caller."""
    observer = RunObserver(settings, kind, show_progress)
    with messages_to(observer.log), ExitStack() as until_told:
        try:
            tracker = until_told.enter_context(track_run(settings.tracker, f"embedder {kind}"))
            observer.tracking = RunTracking(tracker, settings, kind)
            with (
                answering(settings.metrics_address, observer.live),
                trace_run(settings.traces, kind, settings.store) as observer.traces,
            ):
                yield observer
        except USER_MISTAKES as error:
            observer.add_prospect(error)
            observer.on_end(USER_MISTAKE, str(error))
            raise
        except SignalInterrupt as error:
            observer.add_prospect(error)
            observer.on_end(error.exit_code, str(error))
            raise
        except BaseException as error:
            observer.add_prospect(error)
            if details := getattr(error, "details", ""):
                observer.log.add(details)
            observer.on_end(1, str(error) or type(error).__name__)
            raise
        observer.on_end(0, str((observer.report or {}).get("outcome") or "done"))
