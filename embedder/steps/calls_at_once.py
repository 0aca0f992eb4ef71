"""Number of a stage's calls that run at once on a GPU, chosen by a trial on its first batches, which are real work.

While one call computes, the inputs and outputs of others are copied. Each holds a batch in memory, so of numbers that
are equally fast the smallest is taken.
"""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition

from embedder.batch_schema import Measurement

NUM_TRIALS = 3  # of each number, besides as many as are still in flight with the number before
MIN_GAIN = 0.03  # less is noise


class CallsAtOnce:
    """Lets a number of calls run at once; thread-safe. `chosen` is None during the trial, from the most downwards."""

    def __init__(self, most: int, *, is_tried: bool = True) -> None:
        """Start the trial with the most calls that are made at once; one needs no trial.

        `is_tried` false leaves it at the most: of stages that share a device, each waits for what others compute.
        """
        self._limit, self._most, self._running = most, most, 0
        self._costs: dict[int, list[float]] = {most: []}
        self._changed = Condition()
        self.chosen = None if is_tried and most > 1 else most

    @contextmanager
    def call(self) -> Iterator[None]:
        """Block that runs as one of the calls; others wait before it."""
        with self._changed:
            self._changed.wait_for(lambda: self._running < self._limit)
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def note(self, batch: Measurement) -> None:
        """Record a batch, all of which have as many rows; one for which the device waited says nothing.

        What counts are the device's seconds, and those that it waited for this process to bring the batch. Calls of a
        device that waits for others don't overlap, whatever their number.
        """
        starved_s = batch.waited_input_s + batch.waited_driver_s + batch.waited_store_s
        seconds = batch.wall_s + batch.waited_unpack_s + batch.waited_copy_s + batch.waited_launch_s
        with self._changed:
            if self.chosen is not None or starved_s > MIN_GAIN * seconds:
                return
            costs = self._costs[self._limit]
            costs.append(seconds)
            if len(costs) == self._most + NUM_TRIALS:
                self._go_on()
                self._changed.notify_all()

    def _go_on(self) -> None:
        """Try one call fewer, unless that was slower, or end the trial."""
        medians = {number: statistics.median(costs[self._most :]) for number, costs in self._costs.items()}
        fast = [number for number, cost in medians.items() if cost <= (1 + MIN_GAIN) * min(medians.values())]
        if self._limit == 1 or self._limit not in fast:
            self._limit = self.chosen = min(fast)
        else:
            self._limit -= 1
            self._costs[self._limit] = []
