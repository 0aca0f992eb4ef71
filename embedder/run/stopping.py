"""Ctrl-C and SIGTERM: finish what is in flight and keep it; a second signal stops at once."""

import signal
import threading
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
