"""Trackers of experiments: parameters, figures while a run goes on, files at its end; the extras `mlflow` and `wandb`.

    with tracked(config.tracker, "embed") as tracker:
        tracker.begin("run-1", {"model": "models/mine"}, {"store": "runs/archive"})
        tracker.log({"items": 512}, step=512)
        tracker.attach(lambda: {"sheet.png": drawn()})
        tracker.end(succeeded=True, files={"report.json": b"{}"})

All calls are made by a thread of their own, in order, and none is waited for but the last, for some seconds. A tracker
that fails costs one warning; what would follow is left out.
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
MAX_WAITING = 1000  # calls that a slow tracker may be behind
END_S = 30.0  # that the end of a run waits for its tracker
Numbers = Mapping[str, float]
Files = Mapping[str, bytes]
"""Contents by name; `model/config.json` is in a folder."""


class TrackerClient(Protocol):
    """Client of a tracker for one run; each call may raise whatever it likes.

    A plug-in's class (`embedder.entry_points.TRACKERS`) is called with a `TrackerConfig`, imports its package in
    `begin`, and may have a static method `check(config)`, which raises ValueError where keys don't fit together.
    """

    def begin(self, name: str, parameters: Mapping[str, str], tags: Mapping[str, str]) -> str:
        """Begin a run; give its id, or its address."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add values."""

    def add_files(self, files: Mapping[str, bytes]) -> None:
        """Add files; a name may have a folder before it."""

    def end(self, *, succeeded: bool) -> None:
        """End the run."""


class Tracker(Protocol):
    """Tracker of one run, or nothing."""

    def begin(
        self,
        name: str,
        parameters: Mapping[str, str],
        tags: Mapping[str, str],
        told: Callable[[str], None] = lambda tracker_id: None,
    ) -> None:
        """Begin a run.

        Args:
            name: of the run.
            parameters: its settings.
            tags: what it is found by.
            told: given the tracker's id of the run, in the tracker's thread.
        """

    def log(self, values: Numbers, step: int) -> None:
        """Add values at a step, which grows."""

    def attach(self, make: Callable[[], Files]) -> None:
        """Add files that are made in the tracker's thread."""

    def end(self, *, succeeded: bool, files: Files) -> None:
        """Add files by their names, and end the run; nothing where none has begun."""


class NoTracker:
    """Tracker of a run that asked for none."""

    def begin(
        self,
        name: str,
        parameters: Mapping[str, str],
        tags: Mapping[str, str],
        told: Callable[[str], None] = lambda tracker_id: None,
    ) -> None:
        """Begin nothing."""

    def log(self, values: Numbers, step: int) -> None:
        """Add nothing."""

    def attach(self, make: Callable[[], Files]) -> None:
        """Make nothing."""

    def end(self, *, succeeded: bool, files: Files) -> None:
        """End nothing."""


class ThreadedTracker:
    """Tracker whose client is called by a thread of its own."""

    def __init__(self, client: TrackerClient, where: str) -> None:
        """Start the thread."""
        self._client, self._where = client, where
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_WAITING)
        self._has_begun = self._is_given_up = self._has_ended = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="tracker", daemon=True)
        self._thread.start()

    def begin(
        self,
        name: str,
        parameters: Mapping[str, str],
        tags: Mapping[str, str],
        told: Callable[[str], None] = lambda tracker_id: None,
    ) -> None:
        """Begin a run."""
        self._has_begun = True
        self._add(lambda: told(self._client.begin(name, parameters, tags)))

    def log(self, values: Numbers, step: int) -> None:
        """Add values at a step."""
        if self._has_begun:
            self._add(lambda: self._client.log(values, step))

    def attach(self, make: Callable[[], Files]) -> None:
        """Add files that are made in the tracker's thread."""
        if self._has_begun:
            self._add(lambda: self._client.add_files(make()))

    def end(self, *, succeeded: bool, files: Files) -> None:
        """Add files, end the run, and wait for it."""
        if self._has_begun and not self._has_ended:
            self.attach(lambda: files)
            self._add(lambda: self._client.end(succeeded=succeeded))
        self.close()

    def close(self) -> None:
        """Wait for what is under way, for some seconds; a thread that hangs is left, and ends with the process."""
        if self._has_ended:
            return
        self._has_ended = True
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

    def _add(self, call: Callable[[], None] | None) -> None:
        if self._is_given_up:
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._give_up(f"{MAX_WAITING:,} calls behind")

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            if self._is_given_up:
                continue
            try:
                call()
            except Exception as error:  # noqa: BLE001 - a tracker fails no run, whatever its client raises
                self._give_up(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")

    def _give_up(self, reason: str) -> None:
        """Tell why nothing more is told to the tracker, once."""
        with self._lock:
            is_first, self._is_given_up = not self._is_given_up, True
        if is_first:
            LOG.warning(mask(f"tracker {self._where}: given up for this run ({reason}); the run goes on without it"))


@contextmanager
def track_run(config: TrackerConfig | None, where: str) -> Iterator[Tracker]:
    """Give the tracker of the block's run; one that has not ended with the block ends as failed.

    Args:
        config: the section `[tracker]`; None tracks nothing.
        where: the command, for a refusal.

    Raises:
        InstallationError: the tracker's package is missing.
    """
    if config is None:
        yield NoTracker()
        return
    if config.kind in EXTRAS:
        require(config.kind, f"{where} with [tracker]")
    client = load_plugin(TRACKERS, config.kind, "[tracker] kind")(config)
    tracker = ThreadedTracker(client, f"{config.kind} {config.uri or ''}".strip())
    try:
        yield tracker
    finally:
        tracker.end(succeeded=False, files={})
