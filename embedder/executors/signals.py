"""Stop of a run by Ctrl-C, SIGTERM or its time limit: begin nothing, keep what is finished, wait a limited time."""

import logging
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from embedder.errors import StoreError
from embedder.executors.interrupts import SignalCount, hand_on, handling
from embedder.store.store_errors import StoreUnavailableError

LOG = logging.getLogger(__name__)
FINISHING = "finishing what is in flight"


class StopRequest:
    """Request to stop a run, as its engine sees it: immediate here, through a file of the store elsewhere.

    If a signal asked (`by_signal`), somebody waits. After the monotonic time `deadline_s`, if any, work in flight is
    abandoned. `can_break` says whether a signal may interrupt the main thread's work.
    """

    def __init__(self, spread: Callable[[], None], timeout_s: float) -> None:
        """Start without a request.

        `spread` asks the run's tasks elsewhere (`Run.request_stop`); work in flight may take `timeout_s` after a
        signal.
        """
        self.asked = self.by_signal = self.can_break = False
        self.deadline_s: float | None = None
        self.timeout_s = timeout_s
        self._spread = spread

    def request_stop(self) -> None:
        """Ask the run to begin nothing more."""
        self.asked = True
        self.forward()

    def note_signal(self) -> None:
        """Let this process begin nothing more, and end within `timeout_s`; a signal's handler may call this."""
        self.deadline_s = time.monotonic() + self.timeout_s
        self.asked = self.by_signal = True

    def forward(self) -> None:
        """Ask the run's tasks elsewhere; if its store can't be written, the request doesn't reach them."""
        with suppress(StoreError, StoreUnavailableError):
            self._spread()

    @property
    def notice(self) -> str:
        """Line that says what is waited for after a signal."""
        return (
            "stopping; what is inside the stages is finished and kept, as far as stop_timeout_s = "
            f"{self.timeout_s:g} allows"
        )

    @property
    def is_overdue(self) -> bool:
        """Whether the time for work in flight is over."""
        return self.deadline_s is not None and time.monotonic() > self.deadline_s

    @contextmanager
    def breakable(self) -> Iterator[None]:
        """Let a signal interrupt the block: nothing is in flight that could be kept."""
        self.can_break = True
        try:
            yield
        finally:
            self.can_break = False


@contextmanager
def stop_on_signals(
    note: Callable[[], None],
    notice: str = FINISHING,
    *,
    spread: Callable[[], None] = lambda: None,
    can_break: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """Turn the first signal into a request; the second one, or any if `can_break` says so, goes to the earlier handler.

    A thread logs `notice`, as the interrupted main thread may hold a display's locks, then calls `spread`, which
    forwards the request. `note` only sets the request, as the main thread may be interrupted anywhere.
    """
    if threading.current_thread() is not threading.main_thread():  # Python handles signals only there
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

    thread = threading.Thread(target=_announce_signal, args=(received, notice, spread), name="stop", daemon=True)
    thread.start()
    try:
        with handling(handle) as before:
            yield
    finally:
        received.put(None)
        thread.join()


def _announce_signal(received: "queue.SimpleQueue[int | None]", notice: str, spread: Callable[[], None]) -> None:
    """Log the first signal that comes, and forward the request; None ends the wait."""
    if (number := received.get()) is not None:
        LOG.info(f"{signal.Signals(number).name}: {notice}; once more stops at once")
        spread()


@contextmanager
def stop_at(request_stop: Callable[[], None], moment_s: float | None) -> Iterator[threading.Event]:
    """Ask the run to stop at a monotonic time, or never; the event that it yields is set when that happens."""
    time_up = threading.Event()
    if moment_s is None:
        yield time_up
        return

    def ask() -> None:
        time_up.set()
        LOG.info("time is up: finishing what is in flight")
        request_stop()

    if (left_s := moment_s - time.monotonic()) <= 0:
        ask()
        yield time_up
        return
    timer = threading.Timer(min(left_s, threading.TIMEOUT_MAX), ask)
    timer.daemon = True
    timer.start()
    try:
        yield time_up
    finally:
        timer.cancel()
        timer.join()
