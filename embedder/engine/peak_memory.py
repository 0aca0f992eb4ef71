"""The most memory that processes held together, looked at as often as looking costs little."""

import time
from collections.abc import Iterable

import psutil

from embedder.engine import hardware

# The kernel walks all pages to tell what memory is shared: 25 ms for each GiB, 0.15 s for a run of three stages. Looked
# at each second, that would be a fourteenth of two cores.
MEMORY_SHARE = 0.01


class PeakMemory:
    """Watched by one thread.

    Attributes:
        num_bytes: the most so far, each shared page counted once (PSS).
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._next_s = 0.0

    def look(self, processes: Iterable[psutil.Process], *, now: bool = False) -> None:
        """Look, if it is time to, or where it has to be now."""
        if not now and time.monotonic() < self._next_s:
            return
        started_s = time.thread_time()
        self.num_bytes = max(self.num_bytes, self._read(processes))
        self._next_s = time.monotonic() + (time.thread_time() - started_s) / MEMORY_SHARE

    def _read(self, processes: Iterable[psutil.Process]) -> int:
        return hardware.pss_bytes(processes)
