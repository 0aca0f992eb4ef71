"""Threads for work that may take long, with a bounded queue in front of them."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from embedder.plugins.serve.serve_errors import busy

MAX_WAITING_TASKS = 64

T = TypeVar("T")


class TaskThreads:
    """Threads for work that may take long, with a bounded queue, so that neither the event loop nor searches wait."""

    def __init__(self, name: str, num_threads: int, max_waiting: int = MAX_WAITING_TASKS, when_full: str = "") -> None:
        """Make the threads; `when_full` is what a refusal says, by default how many requests wait for what."""
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._max_waiting, self._num_waiting = max_waiting, 0
        self._when_full = when_full or f"{max_waiting} requests wait for {name}"

    async def run(self, task: Callable[..., T], *arguments: Any) -> T:
        """Call a function in one of the threads; RequestError if too many wait already."""
        if self._num_waiting >= self._max_waiting:
            raise busy(self._when_full)
        return await self.continue_answer(task, *arguments)

    async def continue_answer(self, task: Callable[..., T], *arguments: Any) -> T:
        """Call a function for an answer that has begun, however many wait: it can't be refused any more."""
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, task, *arguments)
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        """End the threads."""
        self._executor.shutdown(cancel_futures=True)
