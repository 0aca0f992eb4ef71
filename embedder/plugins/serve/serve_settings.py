"""Settings of the query service, all with unit and effect; imports nothing heavy."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

LOOPBACK = ("localhost", "127.0.0.1", "::1")


class ServeSettings(BaseModel):
    """Settings of one server; frozen, and strict about unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    store: str = Field(description="folder or address of the store")
    model: str | None = Field(None, description="model folder to encode queries with, where it has moved")
    servables: tuple[dict[str, Any], ...] = Field(
        (), description="the operator's own sections [[model]], whose code encodes queries of further models"
    )
    allow_store_code: bool = Field(
        False, description="run code that the store names for further models, as whoever wrote the store wants it"
    )
    follow_s: float = Field(2.0, gt=0, description="seconds between two looks for a newer publication")
    show_uris: bool = Field(False, description="show where the items' files lie")
    access_log: bool = Field(True, description="write a line of JSON about each request to standard error")
    max_versions: int = Field(2, ge=1, description="earlier publications that are held open")
    max_batch: int = Field(32, ge=1, description="queries that are encoded and searched together")
    max_queue: int = Field(512, ge=1, description="queries that may wait; beyond it, 503")
    max_wait_ms: float = Field(
        0.0, ge=0, description="milliseconds that a query waits for others, beyond the computation of those before it"
    )
    num_workers: int = Field(
        1, ge=1, description="batches computed at the same time, each on all cores; as many of long searches"
    )
    answer_cache_bytes: int = Field(64 << 20, ge=0, description="answers that are kept until the next publication")
    reranker: str | None = Field(
        None, description="model folder of a re-ranker, loaded at the start, that scores the first hits of texts again"
    )
    rerank: int = Field(50, ge=1, le=1000, description="first hits that it scores, at most, and unless fewer are asked")
    rerank_timeout_s: float = Field(
        5.0, gt=0, description="seconds that a search waits for it; then its hits come in their first order"
    )
    max_depth: int = Field(10_000, ge=1, le=100_000, description="hits of one query that cursors reach")
    cache_dir: Path | None = Field(None, description="folder of thumbnails; by default in the user's cache")
    cache_bytes: int = Field(1 << 30, ge=0, description="bytes of thumbnails on disk")
    num_decoders: int = Field(2, ge=1, description="sandboxes that make thumbnails and read uploads, each")
    max_waiting_images: int = Field(128, ge=1, description="images that may wait for a sandbox; beyond it, 503")
    decode_timeout_s: float = Field(10.0, gt=0, description="seconds in which an image has to be decoded")
    max_image_bytes: int = Field(256 << 20, ge=1, description="bytes of an item that are held in memory to decode it")
    max_upload_bytes: int = Field(12 << 20, ge=1, description="bytes of one uploaded image")
    max_upload_pixels: int = Field(50_000_000, ge=1, description="pixels of one uploaded image")
    drain_s: float = Field(1.0, ge=0, description="seconds between 503 of /readyz and the end of listening")
    graceful_s: int = Field(20, ge=1, description="seconds that requests have to end in when the server stops")

    host: str = Field("127.0.0.1", description="address to listen on; anything but localhost is reached from elsewhere")
    port: int = Field(8765, ge=0, le=65535, description="port to listen on; 0 takes a free one")

    token_file: Path | None = Field(None, description="file of tokens, one a line; without it nobody is asked for one")
    allowed_hosts: tuple[str, ...] = Field(
        (),
        description="names in the Host header; by default those of localhost when bound to it, else all with a "
        "token_file, and without one the host, localhost, this machine's name, and addresses",
    )
    trusted_proxies: tuple[str, ...] = Field(
        (), description="addresses of reverse proxies, or their networks, whose X-Forwarded-For names the client"
    )
    rate_per_s: float = Field(100.0, gt=0, description="requests of one client a second; loopback is not limited")
    rate_burst: int = Field(400, ge=1, description="requests that a client may send at once")
    max_concurrency: int = Field(256, ge=1, description="requests that are answered at the same time")
    max_connections: int = Field(1024, ge=1, description="open connections")
    max_connections_per_client: int = Field(128, ge=1, description="of these, of one client; loopback is not limited")
    max_body_bytes: int = Field(16 << 20, ge=1024, description="bytes of one request's body")
    max_waiting_bytes: int = Field(256 << 20, ge=1024, description="bytes of all bodies that are being received")
    header_timeout_s: float = Field(10.0, gt=0, description="seconds in which a request's headers have to arrive")
    body_timeout_s: float = Field(30.0, gt=0, description="seconds in which a request's body has to arrive")
    send_timeout_s: float = Field(20.0, gt=0, description="seconds after which a client that reads too slowly is left")
    where_timeout_s: float = Field(2.0, gt=0, description="seconds in which a condition has to be evaluated")


def server_url(host: str, port: int) -> str:
    """Address of a server, by the name or number of its host and its port."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
