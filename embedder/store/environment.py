"""Clocks, sleeps, random names and threads of a store's writers, injected so that a simulator can replace them."""

import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from embedder.errors import StoreError

LEASE_S = 60.0
"""Seconds for which the lock of a store in a bucket holds after its last renewal."""
MAX_LEASE_S = 3600.0
"""Longest lease that is accepted or waited for."""


class Repetition(Protocol):
    """Action that is repeated in the background until it is stopped."""

    def stop(self) -> None:
        """Stop it and wait until it has ended."""


class HeldLock(Protocol):
    """Lock on a store that this process holds (`embedder.store.lock.Lease`).

    `lost` means that another process has taken it, `is_given_up` that this process has removed it.
    """

    lost: bool
    is_given_up: bool

    def confirm(self) -> None:
        """Check, before every commit, that this process still holds it."""

    def swap_current(self, data: bytes) -> None:
        """Replace CURRENT.json, if it is unchanged since the lock was taken."""


class RepeatingThread:
    """Thread that calls an action every few seconds until it returns false or is stopped."""

    def __init__(self, every_s: float, action: Callable[[], bool], name: str) -> None:
        """Start the thread; `action` is called after each `every_s` seconds and returns whether to continue."""
        self._every_s, self._action, self._ended = every_s, action, threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(self._every_s) and self._action():
            pass

    def stop(self) -> None:
        """Stop the thread and wait until it has ended."""
        self._ended.set()
        self._thread.join()


def _boot_clock_s() -> float:
    """Return a monotonic clock that includes the machine's sleep, if the system has one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True)
class Environment:
    """What a writer takes from its machine.

    Attributes:
        clock_s: monotonic clock by which a lock is watched.
        now: wall clock; correctness never depends on it.
        sleep: waits for some seconds.
        token: random hexadecimal name of some bytes.
        repeat: starts a repeated action.
        make_lock: makes a lock among the threads of a process.
    """

    clock_s: Callable[[], float] = _boot_clock_s
    now: Callable[[], datetime] = _utc_now
    sleep: Callable[[float], None] = time.sleep
    token: Callable[[int], str] = secrets.token_hex
    repeat: Callable[[float, Callable[[], bool], str], Repetition] = RepeatingThread
    make_lock: Callable[[], AbstractContextManager[Any]] = threading.Lock


REAL_ENVIRONMENT = Environment()


def lease_s() -> float:
    """Return the seconds that a lock lasts without renewal; StoreError if EMBEDDER_LEASE_S is invalid."""
    text = os.environ.get("EMBEDDER_LEASE_S", str(LEASE_S))
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found <= MAX_LEASE_S:
        raise StoreError(
            f"EMBEDDER_LEASE_S is {text!r}; write seconds above 0, at most {MAX_LEASE_S:g}, or leave it out for "
            f"{LEASE_S:g}"
        )
    return found
