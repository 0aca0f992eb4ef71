"""Experiment trackers: parameters, figures of a running run, files at its end; the extras `mlflow` and `wandb`.

    with track_run(config.tracker, "embed") as tracker:
        tracker.begin("run-1", {"model": "models/mine"}, {"store": "runs/archive"})
        tracker.log({"items": 512}, step=512)
        tracker.attach(lambda: {"sheet.png": drawn()})
        tracker.end(succeeded=True)

A separate thread makes all calls, in order; only the last one is waited for, for some seconds. A failing tracker costs
one warning, and its later calls are skipped.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Protocol

from embedder.config_toml.sections import TrackerConfig
from embedder.entry_points import TRACKERS, load_plugin
from embedder.installation import EXTRAS, require
from embedder.redaction import mask

LOG = logging.getLogger(__name__)
MAX_WAITING = 1000  # calls that a slow tracker may lag behind
END_S = 30.0  # for which the end of a run waits for its tracker


class TrackerClient(Protocol):
    """Client of a tracker for one run; each call may raise any exception.

    A plug-in's class (`embedder.entry_points.TRACKERS`) is called with a `TrackerConfig`, imports its package in
    `begin`, and may have a static method `check(config)`, which raises ValueError if keys don't fit together.
    """

    def begin(self, name: str, parameters: Mapping[str, str], tags: Mapping[str, str]) -> str:
        """Begin a run; return its id or its address."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add values."""

    def add_files(self, files: Mapping[str, bytes]) -> None:
        """Add files; a name may include a folder."""

    def end(self, *, succeeded: bool) -> None:
        """End the run."""


class Tracker:
    """Tracker of one run, whose client a separate thread calls; without a client it does nothing."""

    def __init__(self, client: TrackerClient | None = None, where: str = "") -> None:
        self._where = where
        self._calls: queue.Queue[Callable[[TrackerClient], None] | None] = queue.Queue(MAX_WAITING)
        self._has_begun = self._has_ended = False
        self._is_given_up = client is None
        self._lock = threading.Lock()
        if client is not None:
            self._thread = threading.Thread(target=self._work, args=(client,), name="tracker", daemon=True)
            self._thread.start()

    def begin(
        self,
        name: str,
        parameters: Mapping[str, str],
        tags: Mapping[str, str],
        report: Callable[[str], None] = lambda tracker_id: None,
    ) -> None:
        """Begin a run; `report` is called in the tracker's thread with its id of the run."""
        self._has_begun = True
        self._add(lambda client: report(client.begin(name, parameters, tags)))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add values at a step, which must grow."""
        if self._has_begun:
            self._add(lambda client: client.log(values, step))

    def attach(self, make: Callable[[], Mapping[str, bytes]]) -> None:
        """Add files, contents by name, that are made in the tracker's thread; `model/config.json` is in a folder."""
        if self._has_begun:
            self._add(lambda client: client.add_files(make()))

    def end(self, *, succeeded: bool) -> None:
        """End the run, and wait some seconds for pending calls; does nothing a second time.

        A hanging thread is abandoned, and ends with the process.
        """
        if self._has_ended:
            return
        self._has_ended = True
        if self._has_begun:
            self._add(lambda client: client.end(succeeded=succeeded))
        self._add(None)
        if self._is_given_up:
            with suppress(queue.Empty):
                while True:
                    self._calls.get_nowait()
            self._calls.put_nowait(None)
            return
        self._thread.join(END_S)
        if self._thread.is_alive():
            self._give_up(f"no answer for {END_S:g} s")

    def _add(self, call: Callable[[TrackerClient], None] | None) -> None:
        if self._is_given_up:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._give_up(f"{MAX_WAITING:,} calls behind")

    def _work(self, client: TrackerClient) -> None:
        while (call := self._calls.get()) is not None:
            if self._is_given_up:
                continue
            try:
                call(client)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - a tracker fails no run, whatever it raises
                self._give_up(_describe(error))

    def _give_up(self, reason: str) -> None:
        with self._lock:
            is_first, self._is_given_up = not self._is_given_up, True
        if is_first:
            _warn(self._where, reason)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _warn(where: str, reason: str) -> None:
    LOG.warning(mask(f"tracker {where}: given up for this run ({reason}); the run continues without it"))


@contextmanager
def track_run(config: TrackerConfig | None, where: str) -> Iterator[Tracker]:
    """Yield the tracker of the block's run (None: none); a run that hasn't ended by the block's end counts as failed.

    `where` is the command, for error messages. Raises `InstallationError` if the tracker's package is missing.
    """
    if config is None:
        yield Tracker()
        return
    if config.kind in EXTRAS:
        require(config.kind, f"{where} with [tracker]")
    kind, name = load_plugin(TRACKERS, config.kind, "[tracker] kind"), f"{config.kind} {config.uri or ''}".strip()
    try:
        tracker = Tracker(kind(config), name)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - of a client that can't be made, as of one that fails
        _warn(name, _describe(error))
        tracker = Tracker()
    try:
        yield tracker
    finally:
        tracker.end(succeeded=False)
