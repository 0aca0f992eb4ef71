"""Stop of a run by Ctrl-C, SIGTERM or its time limit: begin nothing, keep what is finished, wait a limited time."""

import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Protocol

from embedder.engine.interrupts import SignalCount, hand_on, handling
from embedder.errors import StoreError
from embedder.store.errors import StoreUnavailableError

FINISHING = "finishing what is in flight"


class Stoppable(Protocol):
    """A run."""

    def request_stop(self) -> None:
        """Ask it to come to an end."""


class StopRequest:
    """Request to stop a run, as its engine sees it: at once here, by a file of the store elsewhere.

    Attributes:
        asked: whether the run is to stop.
        by_signal: whether a signal asked, so that somebody waits.
        deadline_s: monotonic time after which work in flight is left; None for no limit.
    """

    def __init__(self, run: Stoppable, timeout_s: float) -> None:
        self.asked = self.by_signal = False
        self.deadline_s: float | None = None
        self.timeout_s = timeout_s
        self._run = run
        self._can_break = False

    def request_stop(self) -> None:
        """Ask the run to take nothing further."""
        self.asked = True
        self.spread()

    def note_signal(self) -> None:
        """Let this process take nothing further, and end within `timeout_s`; a signal's handler may call this."""
        self.deadline_s = time.monotonic() + self.timeout_s
        self.asked = self.by_signal = True

    def spread(self) -> None:
        """Ask the run's tasks elsewhere; where its store can't be written, the request doesn't reach them."""
        with suppress(StoreError, StoreUnavailableError):
            self._run.request_stop()

    @property
    def notice(self) -> str:
        """Line that says what is waited for after a signal."""
        return f"stopping; what is inside the stages is finished and kept, for at most {self.timeout_s:g} s"

    @property
    def is_overdue(self) -> bool:
        """Whether the time for work in flight is over."""
        return self.deadline_s is not None and time.monotonic() > self.deadline_s

    def can_break(self) -> bool:
        """Whether a signal may break off the main thread's work."""
        return self._can_break

    @contextmanager
    def breakable(self) -> Iterator[None]:
        """Let a signal break off the block: nothing is in flight that could be kept."""
        self._can_break = True
        try:
            yield
        finally:
            self._can_break = False


@contextmanager
def stop_on_signals(
    note: Callable[[], None],
    announce: Callable[[str], None],
    notice: str = FINISHING,
    *,
    spread: Callable[[], None] = lambda: None,
    can_break: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """Turn the first signal into a request; the second one goes to the earlier handler.

    A thread announces it, as the interrupted main thread may hold the locks of a display.

    Args:
        note: sets the request, and does no more: the main thread was interrupted anywhere.
        announce: shows a line, before the block ends.
        notice: text of that line: what is waited for.
        spread: passes the request on, after the announcement.
        can_break: whether the signal may go to the earlier handler at once.
    """
    if threading.current_thread() is not threading.main_thread():  # Python takes signals in that one only
        yield
        return
    received: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # whose `put` may interrupt itself
    presses = SignalCount()

    def handle(number: int, frame: FrameType | None) -> None:
        is_first = presses.is_first()
        if can_break() or presses.is_again():
            hand_on(number, frame, before[number])
        if is_first:
            note()
            received.put(number)

    def announce_signal() -> None:
        if (number := received.get()) is not None:
            announce(f"{signal.Signals(number).name}: {notice}; once more stops at once")
            spread()

    thread = threading.Thread(target=announce_signal, name="stop", daemon=True)
    thread.start()
    try:
        with handling(handle) as before:
            yield
    finally:
        received.put(None)
        thread.join()


@contextmanager
def stop_at(run: Stoppable, moment_s: float | None, announce: Callable[[str], None]) -> Iterator[threading.Event]:
    """Ask the run to stop at a given time; the event that it yields is set when that happens.

    Args:
        run: the run.
        moment_s: Unix time; none never stops it.
        announce: shows a line when the time is up.
    """
    time_up = threading.Event()
    if moment_s is None:
        yield time_up
        return

    def ask() -> None:
        time_up.set()
        announce("time is up: finishing what is in flight")
        run.request_stop()

    if (left_s := moment_s - time.time()) <= 0:
        ask()
        yield time_up
        return
    timer = threading.Timer(left_s, ask)
    timer.daemon = True
    timer.start()
    try:
        yield time_up
    finally:
        timer.cancel()
        timer.join()
