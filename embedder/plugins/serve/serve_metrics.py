"""Metrics of the service for Prometheus, in their own registry; measurement and access log of every request."""

import json
import logging
import time
from contextlib import nullcontext
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from embedder.storage.printable import printable
from embedder.store.layout import utc_now

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZES = (1, 2, 4, 8, 16, 32, 64)


class Metrics:
    """Counters and histograms of one server."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        seconds = partial(Histogram, buckets=SECONDS, registry=registry)
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self.request_seconds = seconds(
            "embedder_request_seconds", "Time from a request's first byte to the answer's last", ("route", "status")
        )
        self.in_flight = gauge("embedder_requests_in_flight", "Requests being answered")
        self.batch_size = Histogram("embedder_batch_queries", "Queries of a batch", buckets=SIZES, registry=registry)
        self.encode_seconds = seconds("embedder_encode_seconds", "Time to encode the texts of a batch")
        self.search_seconds = seconds("embedder_search_seconds", "Time to search for queries of a batch")
        self.rerank_seconds = seconds("embedder_rerank_seconds", "Time to score a query's first hits again")
        self.thumbnail_seconds = seconds("embedder_thumbnail_seconds", "Time to make a thumbnail")
        self.cache_hits = counter("embedder_cache_hits", "Answers and thumbnails that were remembered", ("cache",))
        self.cache_misses = counter("embedder_cache_misses", "Answers and thumbnails that had to be made", ("cache",))
        self.refused = counter("embedder_refused", "Requests refused as too much waited", ("queue",))
        self.queue_length = gauge("embedder_queue_queries", "Queries that wait for a batch")
        self.served_at = gauge("embedder_served_timestamp_seconds", "When what is served was published, Unix time")
        self.recall = gauge("embedder_served_index_recall", "Recall@10 of the index that is served, 0 to 1")
        self.publication = Info("embedder_publication", "Publication that is served", registry=registry)

    def text(self) -> bytes:
        """All metrics in Prometheus' format."""
        return generate_latest(self.registry)


ACCESS_LOG = logging.getLogger("embedder.serve.access")
MAX_PATH_CHARACTERS = 300
OTHER = "other"  # one route for all addresses that don't exist, since clients make them up
QUIET = ("/healthz", "/readyz", "/metrics")


class ObservedApp:
    """ASGI application that measures requests; it wraps all others, so that refusals count."""

    def __init__(self, app: ASGIApp, routes: Starlette) -> None:
        """Wrap an application; the service is the one that `routes` has once they have started."""
        self._app, self._routes = app, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and record its outcome."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        status, num_bytes = 0, 0
        path = scope["path"]

        async def noting(message: Message) -> None:
            nonlocal status, num_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                num_bytes += len(message.get("body", b""))
            await send(message)

        metrics = self._metrics
        try:
            with nullcontext() if metrics is None else metrics.in_flight.track_inprogress():
                await self._app(scope, receive, noting)
        finally:
            self._note(scope, path, status, num_bytes, time.perf_counter() - began)

    @property
    def _metrics(self) -> Metrics | None:
        return getattr(getattr(self._routes.state, "service", None), "metrics", None)

    def _note(self, scope: Scope, path: str, status: int, num_bytes: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", OTHER)
        if (metrics := self._metrics) is not None:
            metrics.request_seconds.labels(route, str(status)).observe(seconds)
        if path in QUIET or not ACCESS_LOG.isEnabledFor(logging.INFO):
            return
        line = {
            "time": utc_now().isoformat(timespec="milliseconds"),
            "method": scope["method"],
            "path": printable(path, MAX_PATH_CHARACTERS),
            "route": route,
            "status": status,  # 0: the client left before there was an answer
            "ms": round(1000 * seconds, 2),
            "bytes": num_bytes,
            "client": (scope.get("client") or ("",))[0],
        }
        ACCESS_LOG.info(json.dumps(line))
