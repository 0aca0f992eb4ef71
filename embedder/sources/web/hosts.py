"""Politeness towards hosts: few parallel requests, none before the time a busy host names, none to a dead one."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from embedder.sources.source_errors import FetchError
from embedder.storage.http import Stop

MAX_FAILURES = 10  # consecutive failed attempts after which a host is left alone
REST_S = 30.0  # at least; longer if it wants no request for longer
MAX_HOSTS = 10_000  # remembered, because a table may name many dead ones
POLL_S = 0.1  # between checks for a stop request while all of a host's places are taken


@dataclass
class _Host:
    places: threading.Semaphore
    num_users: int = 0
    num_failures: int = 0
    waits_until_s: float = field(default=0.0)  # of `time.monotonic`
    rests_until_s: float = field(default=0.0)

    @property
    def is_forgettable(self) -> bool:
        return not self.num_users and not self.num_failures and self.waits_until_s < time.monotonic()

    def check_rest(self, where: str) -> None:
        left_s = self.rests_until_s - time.monotonic()
        if left_s > 0:
            raise FetchError(
                "HostFailing",
                f"{where}: the last {self.num_failures} attempts at this host failed, and it is left alone for "
                f"{left_s:.0f} s; run again later",
                transient=True,
            )


class Hosts:
    """Hosts that are in use or have failed, with the number of requests to each; thread-safe."""

    def __init__(self, max_per_host: int) -> None:
        self._max_per_host = max_per_host
        self._hosts: dict[str, _Host] = {}
        self._lock = threading.Lock()

    @contextmanager
    def place(self, name: str, where: str, stop: Stop) -> Iterator[None]:
        """Wait until a host may get one more request; FetchError if it fails too often, StoppedError on a stop."""
        with self._lock:
            if len(self._hosts) >= MAX_HOSTS:
                self._hosts = {known: each for known, each in self._hosts.items() if each.num_users}
            host = self._hosts.setdefault(name, _Host(threading.Semaphore(self._max_per_host)))
            host.num_users += 1
        try:
            while not host.places.acquire(timeout=POLL_S):
                stop.sleep(0)
            try:
                host.check_rest(where)
                stop.sleep(host.waits_until_s - time.monotonic())
                host.check_rest(where)  # others may have failed meanwhile
                yield
            finally:
                host.places.release()
        finally:
            with self._lock:
                host.num_users -= 1
                if host.is_forgettable:
                    self._hosts.pop(name, None)

    def note(self, name: str, *, failed: bool, wait_s: float = 0.0) -> None:
        """Record how a request ended, while its place is held; the host wants no request for `wait_s`."""
        with self._lock:
            host = self._hosts[name]
            host.num_failures = host.num_failures + 1 if failed else 0
            now_s = time.monotonic()
            host.waits_until_s = max(host.waits_until_s, now_s + wait_s)
            if host.num_failures >= MAX_FAILURES:
                host.rests_until_s = max(now_s + REST_S, host.waits_until_s)
