"""Watch over the head of a cluster.

Without it, Ray's core ends the process silently 60 s after the head is gone, and no Python code runs.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from embedder.errors import HeadLostError
from embedder.executors.cluster_address import find_problem
from embedder.quantities import duration_text

LOG = logging.getLogger(__name__)

INTERVAL_S = 3.0
POLL_S = 0.5
REPORTED_AFTER_S = 10.0  # of silence
LOST_AFTER_S = 30.0
AGAIN_S = 3.0  # for the main thread to leave the block; then it is interrupted again
END_S = 30.0  # then it hangs in native code, which no signal interrupts, and the process is ended
SIGNAL = signal.SIGUSR1


class HeadWatch:
    """Thread that checks whether the head answers; `is_lost` says whether it was given up."""

    def __init__(self, address: str, before_exit: Callable[[str], None] = lambda reason: None) -> None:
        """Prepare the watch; `before_exit` gets the reason if the process must end without returning to the caller."""
        self.is_lost = False
        self._before_exit = before_exit
        self._answered = threading.Event()
        self._address = address
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="head", daemon=True)
        self._interrupts = threading.current_thread() is threading.main_thread()

    @property
    def _message(self) -> str:
        return (
            f"the head of the cluster, {self._address}, has not answered for {LOST_AFTER_S:g} s, and a cluster can't "
            "work without it; start the head again, then the same command"
        )

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the block runs.

        Raises `HeadLostError` if the head is lost; only in the main thread, in another one that is only logged.
        """
        before = signal.signal(SIGNAL, self._interrupt) if self._interrupts else None
        self._thread.start()
        try:
            try:
                yield
            finally:
                self._stop.set()
        finally:
            self._stop.set()  # again: an interruption may have come first
            self._thread.join(AGAIN_S)
            if self._interrupts:
                signal.signal(SIGNAL, before or signal.SIG_DFL)

    def answers(self) -> bool:
        """Return whether the head answers; if it is silent now, wait until it answers again or is lost.

        Raises `HeadLostError` if the head is lost, in the main thread.
        """
        if find_problem(self._address) is None:
            return True
        self._answered.clear()
        while not self.is_lost and not self._answered.wait(POLL_S):
            pass
        return not self.is_lost

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if not self._stop.is_set():
            raise HeadLostError(self._message)

    def _watch(self) -> None:
        answered_s, is_reported = time.monotonic(), False
        while not self._stop.wait(INTERVAL_S):
            problem = find_problem(self._address)
            silent_s = time.monotonic() - answered_s
            if problem is None:
                if is_reported:
                    silence = duration_text(round(silent_s))
                    LOG.info(f"the head of the cluster, {self._address}, answers again after {silence}")
                answered_s, is_reported = time.monotonic(), False
                self._answered.set()
            elif silent_s >= LOST_AFTER_S:
                self._end()
            elif silent_s >= REPORTED_AFTER_S and not is_reported:
                is_reported = True
                LOG.info(f"the head of the cluster, {self._address}, has not answered for {silent_s:.0f} s: {problem}")

    def _end(self) -> None:
        """Interrupt the main thread until it has left the block, as the code it runs may catch errors."""
        self.is_lost = True
        if not self._interrupts:
            LOG.info(self._message)
        given_up_s = time.monotonic()
        while self._interrupts and not self._stop.is_set():
            if time.monotonic() - given_up_s > END_S:
                try:
                    self._before_exit(self._message)
                finally:
                    os.write(2, f"embedder: {self._message}\n".encode())
                    os._exit(1)
            signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)
            self._stop.wait(AGAIN_S)
