"""Metrics of the service for Prometheus, in a registry of their own."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZES = (1, 2, 4, 8, 16, 32, 64)


class Metrics:
    """Counters and histograms of one server."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.request_seconds = Histogram(
            "embedder_request_seconds",
            "Time from a request's first byte to the answer's last",
            ("route", "status"),
            buckets=SECONDS,
            registry=registry,
        )
        self.in_flight = Gauge("embedder_requests_in_flight", "Requests being answered", registry=registry)
        self.batch_size = Histogram("embedder_batch_queries", "Queries of a batch", buckets=SIZES, registry=registry)
        self.encode_seconds = Histogram(
            "embedder_encode_seconds", "Time to encode the texts of a batch", buckets=SECONDS, registry=registry
        )
        self.search_seconds = Histogram(
            "embedder_search_seconds", "Time to search for queries of a batch", buckets=SECONDS, registry=registry
        )
        self.thumbnail_seconds = Histogram(
            "embedder_thumbnail_seconds", "Time to make a thumbnail", buckets=SECONDS, registry=registry
        )
        self.cache_hits = Counter(
            "embedder_cache_hits", "Answers and thumbnails that were remembered", ("cache",), registry=registry
        )
        self.cache_misses = Counter(
            "embedder_cache_misses", "Answers and thumbnails that had to be made", ("cache",), registry=registry
        )
        self.refused = Counter("embedder_refused", "Requests refused as too much waited", ("queue",), registry=registry)
        self._queue_length = Gauge("embedder_queue_queries", "Queries that wait for a batch", registry=registry)
        self.served_at = Gauge(
            "embedder_served_timestamp_seconds", "When what is served was published, Unix time", registry=registry
        )
        self.recall = Gauge(
            "embedder_served_index_recall", "Recall@10 of the index that is served, 0 to 1", registry=registry
        )
        self.publication = Info("embedder_publication", "Publication that is served", registry=registry)

    def watch_queue(self, length: Callable[[], int]) -> None:
        """Take the length of the queue when the metrics are read."""
        self._queue_length.set_function(length)

    def text(self) -> bytes:
        """Write all of it in Prometheus' format."""
        return generate_latest(self.registry)
