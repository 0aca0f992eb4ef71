"""Micro-batches: requests that come at nearly the same time are computed together, in worker threads.

A batch holds what came while the previous one was computed. It is closed when it is full, or when its oldest request
has waited long enough, which by default is at once. A lone request does not wait: the wait applies only while previous
batches had several requests, or others are being computed.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Generic, TypeVar

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")

SMOOTHING = 0.2  # weight of the last batch in the mean size, which decides whether to wait
SEVERAL = 1.5


class BusyError(Exception):
    """Refusal of a request because the queue is full."""


class MicroBatcher(Generic[Asked, Answer]):
    """Queue in front of a function of batches; used from one event loop."""

    def __init__(
        self,
        compute: Callable[[Sequence[Asked]], Sequence[Answer | Exception]],
        executor: Executor,
        *,
        num_workers: int,
        max_batch: int,
        max_queue: int,
        max_wait_s: float,
    ) -> None:
        """Make an empty queue.

        `compute` is called in a thread with up to `max_batch` requests and gives an answer or an error for each;
        `num_workers` calls run at the same time. Up to `max_queue` requests wait, each up to `max_wait_s` for others.
        """
        self._compute, self._executor = compute, executor
        self._num_workers, self._max_batch, self._max_queue = num_workers, max_batch, max_queue
        self._max_wait_s = max_wait_s
        self._queue: deque[tuple[float, Asked, asyncio.Future[Answer]]] = deque()
        self._num_running = 0
        self._mean_size = 1.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    def submit(self, asked: Asked) -> "asyncio.Future[Answer]":
        """Put a request into the queue, BusyError if it is full; the future gets its answer or its error."""
        if len(self._queue) >= self._max_queue:
            raise BusyError(f"max_queue = {self._max_queue} allows no further query to wait")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()
        self._queue.append((loop.time(), asked, future))
        if len(self._queue) == 1 or len(self._queue) >= self._max_batch:
            # After the callbacks of this turn, so that the queries of one request come together.
            loop.call_soon(self._start_batches)
        return future

    async def drain(self) -> None:
        """Wait until all requests are answered."""
        while self._queue or self._num_running:
            await asyncio.sleep(0.01)

    def _start_batches(self) -> None:
        """Start the batches that are due, and set the timer for the next one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        loop = asyncio.get_running_loop()
        while self._queue and self._num_running < self._num_workers:
            wait_s = self._queue[0][0] + self._wait_s - loop.time()
            if len(self._queue) < self._max_batch and wait_s > 0:
                self._timer = loop.call_later(wait_s, self._start_batches)
                return
            self._start_batch()

    @property
    def _wait_s(self) -> float:
        alone = self._mean_size < SEVERAL and self._num_running == 0
        return 0.0 if alone else self._max_wait_s

    def _start_batch(self) -> None:
        size = min(self._max_batch, len(self._queue))
        batch = [self._queue.popleft() for _ in range(size)]
        batch = [each for each in batch if not each[2].done()]  # cancelled ones need no answer
        self._mean_size += SMOOTHING * (size - self._mean_size)
        if not batch:
            return
        self._num_running += 1
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self._executor, self._compute, [asked for _, asked, _ in batch])
        running.add_done_callback(lambda done: self._deliver([future for _, _, future in batch], done))

    def _deliver(
        self, futures: Sequence["asyncio.Future[Answer]"], done: "asyncio.Future[Sequence[Answer | Exception]]"
    ) -> None:
        self._num_running -= 1
        problem = asyncio.CancelledError() if done.cancelled() else done.exception()
        answers = [problem] * len(futures) if problem is not None else done.result()
        for future, answer in zip(futures, answers, strict=True):
            if future.done():
                continue
            if isinstance(answer, BaseException):
                future.set_exception(answer)
            else:
                future.set_result(answer)
        self._start_batches()
