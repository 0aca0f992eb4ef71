"""Ctrl-C, SIGTERM, SIGHUP for a whole command: the first unwinds it or is handled by the run; a second ends it at once.

SIGHUP comes when the terminal goes, as with a lost connection; where it is ignored, as below nohup, it stays ignored.
"""

import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME_S = 0.5  # a terminal and a wrapper may both pass on one key press
BY_SIGNAL = 128  # plus its number: the exit code of what a signal ended, as shells have it
SHOW_CURSOR = "\x1b[?25h"  # a progress bar that is cut off has hidden it

Handler = Callable[[int, FrameType | None], object]

_notices: list[Callable[[int], None]] = []
"""Callbacks of the blocks that hold signals back; the last one announces a signal."""


class SignalInterrupt(BaseException):
    """Interruption of a command by a signal; no `Exception`, so that only the command's end catches it."""

    is_resumable = True

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = BY_SIGNAL + number


class SignalCount:
    """Distinction between a second signal and a first one that comes twice."""

    def __init__(self) -> None:
        self._first_s: float | None = None

    def is_first(self) -> bool:
        """Note a signal, and return whether it is the first."""
        if self._first_s is not None:
            return False
        self._first_s = time.monotonic()
        return True

    def is_again(self) -> bool:
        """Whether a signal that comes now is a second one."""
        return self._first_s is not None and time.monotonic() - self._first_s > SAME_S


@contextmanager
def interruptible() -> Iterator[None]:
    """Let the first signal raise `SignalInterrupt` in the main thread, and a second end the process and its children.

    A thread distinguishes the two, as Python's own handlers wait for the main thread, which may be in native code.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    receiver, sender = os.pipe()
    os.set_blocking(sender, False)
    threading.Thread(target=_end_at_second, args=(receiver,), name="signals", daemon=True).start()
    wakeup = signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    presses = SignalCount()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if presses.is_first():  # later ones would break off what the first one's end cleans up
            raise SignalInterrupt(number)

    try:
        with handling(interrupt):
            yield
    finally:
        signal.set_wakeup_fd(wakeup)
        os.close(sender)  # which ends the thread


@contextmanager
def handling(handler: Handler) -> Iterator[dict[int, Handler | int]]:
    """Handle the signals in the block; yields the handlers that each signal had before."""
    before: dict[int, Handler | int] = {int(each): signal.getsignal(each) or signal.SIG_DFL for each in SIGNALS}
    if before[signal.SIGHUP] == signal.SIG_IGN:
        del before[signal.SIGHUP]
    try:
        for number in before:
            signal.signal(number, handler)
        yield before
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _end_at_second(receiver: int) -> None:
    """Read the numbers of signals as they come, until the pipe is closed or a second one ends the process.

    The first one is announced here too: Python's handlers wait for the main thread.
    """
    presses = SignalCount()
    with os.fdopen(receiver, "rb", buffering=0) as numbers:
        while number := numbers.read(1):
            if number[0] not in SIGNALS:
                continue
            if number[0] == signal.SIGHUP:
                _leave_terminal()
            if presses.is_first():
                for notice in _notices[-1:]:
                    notice(number[0])
            elif presses.is_again():
                end_at_once(number[0])


def _leave_terminal() -> None:
    """Write into nothing from now on where the terminal, which is gone, would refuse each line."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(number).st_mode):
                os.dup2(null, number)
    os.close(null)


def end_at_once(number: int) -> None:
    """End this process and all its descendants, whatever they do."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()
    cursor = SHOW_CURSOR if sys.stderr.isatty() else ""
    with suppress(OSError):
        os.write(2, f"{cursor}embedder: {signal.Signals(number).name} again: ended at once\n".encode())
    os._exit(BY_SIGNAL + number)


@contextmanager
def delay_signals(doing: str) -> Iterator[None]:
    """Delay signals while native code runs that must not be broken off; the first is announced, and follows it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    terminal = os.dup(2)  # the block may silence standard error
    numbers: list[int] = []

    pending = [f"stopping, once {doing}; once more ends at once\n"]

    def notice(number: int) -> None:
        """Announce the first signal once; called by a thread while the main one is in native code."""
        with suppress(IndexError, OSError):
            os.write(terminal, f"{signal.Signals(number).name}: {pending.pop()}".encode())

    def hold(number: int, frame: FrameType | None) -> None:
        numbers.append(number)
        notice(number)

    _notices.append(notice)
    try:
        with handling(hold) as before:
            yield
    finally:
        _notices.remove(notice)
        pending.clear()
        os.close(terminal)
    if numbers:
        hand_on(numbers[0], None, before[numbers[0]])


def hand_on(number: int, frame: FrameType | None, handler: Handler | int | None) -> None:
    """Handle a signal as the earlier `handler`, as `signal.getsignal` gives it, would have."""
    if callable(handler):
        handler(number, frame)
    elif handler != signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
