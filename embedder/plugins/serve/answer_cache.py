"""Answers to equal queries, remembered until the next publication; those being computed are shared."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable

from embedder.plugins.serve.metrics import Metrics

ENTRY_BYTES = 500  # of a key and its places in the table


class AnswerCache:
    """Answers by key within a number of bytes, the least recently used of which are forgotten; of one event loop."""

    def __init__(self, max_bytes: int, metrics: Metrics) -> None:
        """Make an empty cache.

        Args:
            max_bytes: of all answers.
            metrics: of the server.
        """
        self._max_bytes = max_bytes
        self._hits, self._misses = metrics.cache_hits.labels("answers"), metrics.cache_misses.labels("answers")
        self._known: OrderedDict[Hashable, bytes] = OrderedDict()
        self._coming: dict[Hashable, asyncio.Future[bytes]] = {}
        self._num_bytes = self._generation = 0

    async def get(self, key: Hashable, compute: Callable[[], "asyncio.Future[bytes]"]) -> bytes:
        """Give the answer that is remembered, or comes already, or else is asked for.

        Args:
            key: publication, query and options.
            compute: asks for it.
        """
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            self._hits.inc()
            return known
        coming = self._coming.get(key)
        if coming is None:
            self._misses.inc()
            coming = self._coming[key] = compute()
            generation = self._generation
            coming.add_done_callback(lambda done: self._keep(key, done, generation))
        else:
            self._hits.inc()
        return await asyncio.shield(coming)

    def clear(self) -> None:
        """Forget all answers, and what is being computed."""
        self._generation += 1
        self._known.clear()
        self._coming.clear()
        self._num_bytes = 0

    def _keep(self, key: Hashable, done: "asyncio.Future[bytes]", generation: int) -> None:
        failed = done.cancelled() or done.exception() is not None
        if generation != self._generation:  # forgotten meanwhile
            return
        self._coming.pop(key, None)
        if failed:
            return
        self._known[key] = done.result()
        self._num_bytes += len(done.result()) + ENTRY_BYTES
        while self._num_bytes > self._max_bytes:
            _, answer = self._known.popitem(last=False)
            self._num_bytes -= len(answer) + ENTRY_BYTES
