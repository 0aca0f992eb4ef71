"""Tunes a stage's batch size by trying several sizes on its first batches, which are real work.

The best size depends on the layers, the dtype, the caches and other processes; no table covers all of that.
"""

import statistics
import threading
from collections.abc import Sequence

NUM_TRIALS = 3  # of each size, besides the first, which loads kernels
MAX_S = 2.0  # of all trials; large models hardly benefit from any size
MIN_GAIN = 0.03  # less is noise, and the first size stays


class BatchSize:
    """Size of the next batch, chosen from measured costs; `chosen` is None during the trials."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """Start the trials with candidates in rows, the default first; a single one needs no trial."""
        self._costs: dict[int, list[float]] = {size: [] for size in sizes}
        self._default = sizes[0]
        self._spent_s = 0.0
        self._lock = threading.Lock()
        self.chosen = sizes[0] if len(self._costs) == 1 else None

    def next_rows(self, block_rows: int) -> int:
        """Return the rows of the next batch of a block: the size tried least often so far, or the chosen one.

        A size above the default that the block doesn't hold is left out, as it would be asked for again in every block.
        """
        held = [size for size in self._costs if size <= max(block_rows, self._default)]
        return self.chosen or min(held, key=lambda size: len(self._costs[size]))

    def note(self, num_rows: int, seconds: float) -> None:
        """Record the cost of a batch; other sizes, such as a block's last batch, are ignored."""
        if self.chosen is not None or num_rows not in self._costs:
            return
        with self._lock:
            self._costs[num_rows].append(seconds / num_rows)
            self._spent_s += seconds
            if self._spent_s >= MAX_S or all(len(costs) > NUM_TRIALS for costs in self._costs.values()):
                self.chosen = self._best()

    def _best(self) -> int:
        medians = {size: statistics.median(costs[1:]) for size, costs in self._costs.items() if len(costs) > 1}
        if self._default not in medians:
            return self._default
        best = min(medians, key=medians.__getitem__)
        return best if medians[best] < (1 - MIN_GAIN) * medians[self._default] else self._default
