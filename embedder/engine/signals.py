"""Ctrl-C, SIGTERM, time up: take nothing further, keep what is finished, and wait for the rest no longer than said."""

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
    """Whatever runs."""

    def request_stop(self) -> None:
        """Ask it to come to an end."""


class StopRequest:
    """Whether a run is asked to stop, as its engine sees it: at once here, by a file of the store elsewhere.

    Attributes:
        asked: whether anybody asked.
        by_signal: whether that was a person or a scheduler, who waits.
        deadline_s: of the monotonic clock; after it, what is in flight is not waited for. None: no matter how long.
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
        """Ask the run's tasks elsewhere; where its store can't be written, they don't hear of it."""
        with suppress(StoreError, StoreUnavailableError):
            self._run.request_stop()

    @property
    def notice(self) -> str:
        """What is waited for after a signal."""
        return f"stopping; what is inside the stages is finished and kept, for at most {self.timeout_s:g} s"

    @property
    def is_overdue(self) -> bool:
        """Whether nothing is waited for any more."""
        return self.deadline_s is not None and time.monotonic() > self.deadline_s

    def can_break(self) -> bool:
        """Whether a signal may break off what the main thread does."""
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
    """Turn the first signal into a request; the second goes where it would have gone.

    It is told in a thread, as the interrupted main thread may hold the locks of a display.

    Args:
        note: takes note of the signal, and does no more: the main thread was interrupted anywhere.
        announce: is told what is waited for, before the block ends.
        notice: says that.
        spread: passes the request on, after that.
        can_break: asked whether the signal may go where it would have gone instead.
    """
    if threading.current_thread() is not threading.main_thread():  # Python takes signals in that one only
        yield
        return
    heard: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # whose `put` may interrupt itself
    presses = SignalCount()

    def handle(number: int, frame: FrameType | None) -> None:
        is_first = presses.is_first()
        if can_break() or presses.is_again():
            hand_on(number, frame, before[number])
        if is_first:
            note()
            heard.put(number)

    def tell() -> None:
        if (number := heard.get()) is not None:
            announce(f"{signal.Signals(number).name}: {notice}; once more stops at once")
            spread()

    thread = threading.Thread(target=tell, name="stop", daemon=True)
    thread.start()
    try:
        with handling(handle) as before:
            yield
    finally:
        heard.put(None)
        thread.join()


@contextmanager
def stop_at(run: Stoppable, moment_s: float | None, announce: Callable[[str], None]) -> Iterator[threading.Event]:
    """Ask the run to stop at a time (Unix, seconds), if one is given; the event says whether that happened."""
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
