"""The parts of a running service, which the routes work with: publications, queue, caches, threads."""

import asyncio
import gc
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import Any

from starlette.requests import Request

from embedder.errors import ConfigError, StoreError
from embedder.media.limits import DecodeLimits
from embedder.plugins.serve.hit_reranker import HitReranker
from embedder.plugins.serve.micro_batcher import BusyError, MicroBatcher
from embedder.plugins.serve.publications import Publications
from embedder.plugins.serve.search_batch import Answer, Asked, BatchSearcher, page_of
from embedder.plugins.serve.serve_errors import STORE_RETRY_S, RequestError, busy, mistake
from embedder.plugins.serve.serve_metrics import Metrics
from embedder.plugins.serve.serve_settings import ServeSettings
from embedder.plugins.serve.served_publication import ServedPublication
from embedder.plugins.serve.task_threads import TaskThreads
from embedder.plugins.serve.thumbnails import DecoderThreads, ThumbnailCache, Thumbnails
from embedder.redaction import mask
from embedder.retrieval.hits import Hits
from embedder.storage.user_cache import cache_folder
from embedder.store.files import StoreFiles
from index.index_errors import RetrievalError

LOG = logging.getLogger(__name__)

ENTRY_BYTES = 500  # of a key and its places in the table


class AnswerCache:
    """Answers by key, up to a number of bytes; the least recently used are dropped. For one event loop."""

    def __init__(self, max_bytes: int, metrics: Metrics) -> None:
        self._max_bytes = max_bytes
        self._hits, self._misses = metrics.cache_hits.labels("answers"), metrics.cache_misses.labels("answers")
        self._known: OrderedDict[Hashable, bytes] = OrderedDict()
        self._coming: dict[Hashable, asyncio.Future[bytes]] = {}
        self._num_bytes = self._generation = 0

    async def get(self, key: Hashable, compute: Callable[[], "asyncio.Future[bytes]"]) -> bytes:
        """Return the answer that is remembered or already being computed, or else compute it."""
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

    def forget(self, key: Hashable) -> None:
        """Don't remember an answer that is being computed."""
        self._coming.pop(key, None)

    def clear(self) -> None:
        """Forget all answers, and what is being computed."""
        self._generation += 1
        self._known.clear()
        self._coming.clear()
        self._num_bytes = 0

    def _keep(self, key: Hashable, done: "asyncio.Future[bytes]", generation: int) -> None:
        failed = done.cancelled() or done.exception() is not None
        if generation != self._generation or self._coming.get(key) is not done:  # forgotten in the meantime
            return
        del self._coming[key]
        if failed:
            return
        self._known[key] = done.result()
        self._num_bytes += len(done.result()) + ENTRY_BYTES
        while self._num_bytes > self._max_bytes:
            _, answer = self._known.popitem(last=False)
            self._num_bytes -= len(answer) + ENTRY_BYTES


class Service:
    """One open store and all that answers requests about it; made, used and closed in one event loop.

    `long_batcher` has the queries that take several times as long, so that the others in `batcher` don't wait for them.
    Conditions, look-ups, earlier publications (`versions`), files (`clips`), sheets and archives (`exports`) and
    uploads have their own threads. `is_ready` says whether requests should be sent here.
    """

    def __init__(self, settings: ServeSettings) -> None:
        """Open the store; StoreError if there is no store, or nothing is published yet.

        ConfigError or ModelError if the re-ranker can't be loaded.
        """
        self.settings, self.metrics = settings, Metrics()
        self.reranker = HitReranker(settings, self.metrics)
        self.started = time.monotonic()
        self.is_ready = False
        self._loop = asyncio.get_running_loop()
        self._workers = ThreadPoolExecutor(2 * settings.num_workers, thread_name_prefix="search")
        search = BatchSearcher(self.metrics)
        self.batcher, self.long_batcher = (
            MicroBatcher[Asked, Answer](
                search,
                self._workers,
                num_workers=settings.num_workers,
                max_batch=settings.max_batch,
                max_queue=settings.max_queue,
                max_wait_s=settings.max_wait_ms / 1000,
            )
            for _ in range(2)
        )
        batchers = (self.batcher, self.long_batcher)
        self.metrics.queue_length.set_function(lambda: sum(each.num_waiting for each in batchers))
        self.answers = AnswerCache(settings.answer_cache_bytes, self.metrics)
        self.conditions, self.lookups = TaskThreads("conditions", 2), TaskThreads("lookups", 2)
        self.versions, self.clips = TaskThreads("versions", 1), TaskThreads("clips", 4)
        self.exports = TaskThreads("exports", 2)
        limits = DecodeLimits(timeout_s=settings.decode_timeout_s)
        uploads = DecodeLimits(
            timeout_s=settings.decode_timeout_s,
            max_pixels=settings.max_upload_pixels,
            max_file_bytes=settings.max_upload_bytes,
        )
        self.uploads = DecoderThreads("uploads", settings.num_decoders, settings.max_waiting_images, uploads)
        decoders = DecoderThreads("thumbnails", settings.num_decoders, settings.max_waiting_images, limits)
        cache = ThumbnailCache(self._cache_folder(), settings.cache_bytes)
        self._decoders, self.thumbnails = decoders, Thumbnails(cache, decoders, self.metrics, settings.max_image_bytes)
        self.publications = Publications(settings, self._forget_earlier)  # last: it calls back from another thread

    async def start(self) -> None:
        """Load what the first requests need, and compare the thumbnails on disk with the store."""
        await self.lookups.run(self.publications.warm_up)
        self._show_publication(self.publications.current)
        self._reading = asyncio.create_task(self.versions.run(self._purge_thumbnails, self.publications.current))
        gc.collect()
        gc.freeze()  # loaded objects stay: no later collection spends tens of milliseconds on them
        self.is_ready = True

    async def close(self) -> None:
        """Answer what is waiting, and end all threads and sandboxes."""
        self.is_ready = False
        await self.batcher.drain()
        await self.long_batcher.drain()
        await asyncio.to_thread(self._close)

    def submit(self, asked: Asked) -> "asyncio.Future[Any]":
        """Put a query into the queue; RequestError if the queue is full."""
        try:
            return (self.long_batcher if asked.takes_long else self.batcher).submit(asked)
        except BusyError as error:
            self.metrics.refused.labels("queries").inc()
            raise busy(str(error)) from None

    async def write_page(self, asked: Asked, hits: Hits) -> bytes:
        """Write the JSON of a query's hits, in the threads of searches: as many may wait as queries are answered."""
        return await self._loop.run_in_executor(self._workers, page_of, asked, hits)

    async def publication(self, request: Request, version: str | None) -> ServedPublication:
        """Return a publication by name, None for the newest; RequestError if it is unknown or no longer readable.

        The request's state keeps it: what can't be read meanwhile is answered by whether it is the newest.
        """
        found = self.publications.current
        if version is not None and version.partition("/")[0] != found.run_id:
            found = await self.versions.run(self.publications.at, version)
        request.state.publication = found
        return found

    async def of_model(self, publication: ServedPublication, model: str | None) -> ServedPublication:
        """Return the publication for a model, None or `main` for the main one; RequestError if it is unusable."""
        found = publication.find_open(model)
        if found is not None:
            return found
        try:
            return await self.versions.run(publication.of_model, model or "")
        except (StoreError, RetrievalError) as error:
            if not publication.is_current:
                raise
            LOG.error(f"model {model} can't be opened: {mask(str(error))}")  # with places of this machine
            raise RequestError(
                503,
                "body.model",
                f"the files of {model} can't be read",
                "a model whose files are whole",
                "choose another model, and tell the operator: the log has the reason",
                retry_after=str(STORE_RETRY_S),
            ) from None

    async def check_condition(self, publication: ServedPublication, where: str | None) -> None:
        """Evaluate a condition, whose result the search then finds, in threads that searches don't wait for.

        Raises `ConfigError` if it is no condition over the columns, does more than that, or takes too long.
        """
        if where is not None and not publication.has_condition(where):
            await self.conditions.run(publication.remember_condition, where, self.settings.where_timeout_s)

    async def filtered_publication(self, request: Request, version: str | None, where: str | None) -> ServedPublication:
        """Open a version's publication and evaluate a condition over its rows; RequestError if either is invalid."""
        publication = await self.publication(request, version)
        try:
            await self.check_condition(publication, where)
        except ConfigError as error:
            raise mistake(error, "query.where") from None
        return publication

    def _forget_earlier(self, publication: ServedPublication) -> None:
        """Forget what belongs to earlier publications; called on the thread that follows the store."""
        self._loop.call_soon_threadsafe(self.answers.clear)
        self._show_publication(publication)
        self._purge_thumbnails(publication)

    def _show_publication(self, publication: ServedPublication) -> None:
        self.metrics.publication.info({"run_id": publication.run_id, "version": publication.version})
        self.metrics.served_at.set(publication.store.current.published_at.timestamp())
        self.metrics.recall.set(publication.index_recall)

    def _purge_thumbnails(self, publication: ServedPublication) -> None:
        if publication is self.publications.current:  # else the next one does
            self.thumbnails.cache.keep_only(publication.store.searcher.snapshot.metadata.ids)

    def _cache_folder(self) -> Any:
        name = blake2b(StoreFiles(self.settings.store).address.encode(), digest_size=8).hexdigest()
        return (self.settings.cache_dir or cache_folder("thumbnails")) / name

    def _close(self) -> None:
        self.publications.close()
        tasks = (self.conditions, self.lookups, self.versions, self.clips, self.exports)
        for threads in (self.reranker, *tasks, self.uploads, self._decoders):
            threads.close()
        self._workers.shutdown()


def too_large(where: str, what: str, rule: str) -> RequestError:
    """Refuse what exceeds the limits."""
    return RequestError(413, where, what, rule, "send less")
