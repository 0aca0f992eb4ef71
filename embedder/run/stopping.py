"""Ctrl-C, SIGTERM, time up: finish what is in flight and keep it; a second signal stops at once."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stoppable(Protocol):
    """Whatever runs."""

    def request_stop(self) -> None:
        """Ask it to come to an end."""


@contextmanager
def stop_on_signals(run: Stoppable, announce: Callable[[str], None]) -> Iterator[None]:
    """Turn the first signal into a request to the run; Python takes signals in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        for each in SIGNALS:
            signal.signal(each, before[each])
        announce(f"{signal.Signals(number).name}: finishing what is in flight; once more stops at once")
        run.request_stop()

    before = {each: signal.signal(each, handle) for each in SIGNALS}
    try:
        yield
    finally:
        for each in SIGNALS:
            signal.signal(each, before[each])


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
