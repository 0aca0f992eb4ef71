"""Re-ranker of a service: loaded once, asked in its own thread, and only for as long as searches may wait."""

import logging
import time
from collections.abc import Generator, Iterable
from dataclasses import replace
from pathlib import Path

from embedder.encoders.yes_no_reranker import YesNoReranker
from embedder.media.decoder_process import Pixels
from embedder.media.limits import DecodeLimits
from embedder.media.sandbox import SandboxedDecoder
from embedder.plugins.serve.api_schema import Query
from embedder.plugins.serve.cursors import following
from embedder.plugins.serve.search_batch import Asked
from embedder.plugins.serve.serve_errors import RequestError
from embedder.plugins.serve.serve_metrics import Metrics
from embedder.plugins.serve.serve_settings import ServeSettings
from embedder.plugins.serve.thumbnails import DecoderThreads
from embedder.redaction import mask
from embedder.retrieval.hit import Hit, decode_hits
from embedder.retrieval.hits import Hits
from embedder.retrieval.queries import DEFAULT_OPTIONS, SearchOptions
from embedder.retrieval.rerank import image_size_of, rerank_hits
from embedder.sources.fetch import Fetcher
from embedder.storage.item_error import ItemError

LOG = logging.getLogger(__name__)
TEXT_RULE = "a re-ranker scores what fits a text", "search with a text, or leave it out"


class HitReranker:
    """Re-ranker of a service, if it was started with one; used from one event loop."""

    def __init__(self, settings: ServeSettings, metrics: Metrics) -> None:
        """Load the re-ranker; ConfigError or ModelError if there is none in that folder, or it can't be loaded."""
        self._settings, self._metrics = settings, metrics
        self._stage = None if settings.reranker is None else YesNoReranker(settings.reranker).load()
        limits = DecodeLimits(timeout_s=settings.decode_timeout_s, max_file_bytes=settings.max_image_bytes)
        self._threads = DecoderThreads("rerank", 1, settings.max_waiting_images, limits)

    @property
    def num_hits(self) -> int:
        """Most first hits of a query that are scored again; 0 without a re-ranker."""
        return 0 if self._stage is None else self._settings.rerank

    def limit_options(self, options: SearchOptions, query: Query, where: str) -> SearchOptions:
        """Return the options of a query as far as the service fulfils them: how many hits, and for how long.

        Raises `RequestError` if it is asked for more, or for a query without a text.
        """
        asked, most = options.rerank, self.num_hits
        if asked and asked > most:
            has_one = f"up to {most} hits" if most else "a service that was started with a re-ranker"
            raise RequestError(422, "body.rerank", f"{asked}", has_one, "ask for fewer" if most else "leave it out")
        if asked and query.text is None:
            raise RequestError(422, f"{where}.{query.given[0]}", "a query without a text", *TEXT_RULE)
        num_hits = most if asked is None and query.text is not None else asked or 0
        timeout_s = min(options.rerank_timeout_s, self._settings.rerank_timeout_s)
        usual = DEFAULT_OPTIONS.rerank_timeout_s
        return replace(options, rerank=num_hits, rerank_timeout_s=timeout_s if num_hits else usual)

    async def order(self, asked: Asked, hits: Hits) -> bool:
        """Order the first hits that no page has shown; return whether that is final.

        It is not where a warning says why that was not done, or an image could not be read for a moment.
        """
        options, began_s = asked.options or DEFAULT_OPTIONS, time.monotonic()
        first, rest = hits[: options.rerank], hits[options.rerank or 0 :]
        first, _ = following(first, asked.seen, replace(options, k=max(1, len(first))))
        if not first:
            return True
        try:
            late, is_final = await self._threads.run(lambda *threads: self._order(asked, first, began_s, *threads))
        except RequestError:
            late = "too many searches wait for the re-ranker, so the hits come in their first order; search again"
            is_final = False
        if late is not None:
            hits.warnings.append(late)
        hits[:] = [*first, *rest]
        return is_final

    def _order(
        self, asked: Asked, hits: list[Hit], began_s: float, decoder: SandboxedDecoder, fetcher: Fetcher
    ) -> tuple[str | None, bool]:
        """Return why the hits are in their first order, if they are, and whether the order is final."""
        stage, options = self._stage, asked.options
        if stage is None or options is None:
            raise TypeError("nothing is to be scored")
        for hit in hits:
            vars(hit)["files"] = asked.publication.files
        resize = image_size_of(stage)
        failures: list[ItemError] = []
        pixels = None if resize is None else _note_failures(decode_hits(hits, resize, decoder, fetcher), failures)
        try:
            late = rerank_hits(hits, asked.text, stage, replace(options, rerank=len(hits)), pixels, began_s)
            return late, late is None and not any(each.transient for each in failures)
        except Exception as error:  # noqa: BLE001  # of one search, which is answered all the same
            LOG.warning(f"the re-ranker fails: {mask(str(error) or type(error).__name__)}")
            return f"the re-ranker fails ({type(error).__name__}), so the hits come in their first order", False
        finally:
            self._metrics.rerank_seconds.observe(time.monotonic() - began_s)
            if pixels is not None:
                pixels.close()

    def close(self) -> None:
        """End its thread."""
        self._threads.close()


def _note_failures(found: Iterable[Pixels | ItemError], failures: list[ItemError]) -> Generator[Pixels | None]:
    """Yield the pixels, or None for an error, which `failures` get."""
    for each in found:
        if isinstance(each, ItemError):
            failures.append(each)
            yield None
        else:
            yield each


def whole_address(reranker: str) -> str:
    """Return a re-ranker's address for processes that run in other folders; ConfigError if there is none."""
    YesNoReranker(reranker)
    return str(Path(reranker).resolve()) if Path(reranker).is_dir() else reranker
