"""Downloads in advance: in parallel, bounded in number, handed out in the order of the addresses."""

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import islice

from embedder.sources.fetched import Fetched
from embedder.sources.web.body import SizeLimits
from embedder.sources.web.client import WebClient
from embedder.storage.http import Stop

DEPTH = 2  # running or waiting downloads per thread: the next ones continue while one is decoded


class DownloadsAhead:
    """Downloads of some addresses; used by one thread."""

    def __init__(self, client: WebClient, addresses: Iterable[str], limits: SizeLimits) -> None:
        """Start the first downloads.

        `client.parallel` is the number of threads; `addresses` come in the order in which they will be taken.
        """
        self._client, self._limits, self._stop = client, limits, Stop()
        self._addresses = iter(addresses)
        parallel = client.settings.parallel
        self._pool = ThreadPoolExecutor(parallel, "download")
        self._under_way: deque[tuple[str, Future[Fetched]]] = deque()
        self._begin(DEPTH * parallel)

    def take(self, address: str) -> Fetched | None:
        """Wait for the next download; None if it has another address, a FetchError if it failed."""
        if not self._under_way or self._under_way[0][0] != address:
            return None
        _, download = self._under_way.popleft()
        self._begin(1)
        return download.result()

    def close(self) -> None:
        """Stop all downloads, and delete what nobody took."""
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)
        for _, download in self._under_way:
            if not download.cancelled() and download.exception() is None:
                with suppress(OSError):
                    download.result().close()
        self._under_way.clear()

    def _begin(self, number: int) -> None:
        for address in islice(self._addresses, number):
            download = self._pool.submit(self._client.download, address, self._limits, self._stop)
            self._under_way.append((address, download))
