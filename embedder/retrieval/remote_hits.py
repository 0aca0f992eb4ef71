"""Hits of a query service: read from its answers, with images that the service makes."""

import math
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from embedder.media.decoder_process import Pixels
from embedder.media.media_errors import DecodeError
from embedder.media.resize import ResizeSpec
from embedder.media.sandbox import SandboxedDecoder
from embedder.retrieval.hit import IMAGE_PX, THUMBNAIL, Duplicate, Hit, Segment
from embedder.retrieval.hits import Hits
from embedder.retrieval.http_client import HttpClient
from embedder.retrieval.queries import SearchOptions
from embedder.sources.fetch import Fetcher, FetchError

if TYPE_CHECKING:
    from PIL.Image import Image


SIZES_PX = (160, 320, 640, 1280)  # image sizes that a service offers


NUM_FETCHING = 4  # images of one answer fetched at the same time


class RemoteHit(Hit):
    """Hit whose image is fetched from the service that found it.

    Its connection is not a field, so that it is compared, printed and written like any hit.
    """

    client: HttpClient
    links: Mapping[str, str | None]

    def image_bytes(self, size_px: int) -> bytes:
        """Fetch the image as the service makes it, or the frame in the middle of the segment.

        Args:
            size_px: least length of its longer side, if the service makes any that large.

        Raises:
            embedder.sources.fetch.FetchError: the image is gone, or can't be fetched.
        """
        link = self.links["image"]
        if link is None:
            raise FetchError("NoContent", f"{self.item_id}: there is no image")
        address = urlsplit(link)
        size = next((each for each in SIZES_PX if each >= size_px), SIZES_PX[-1])
        query = urlencode(dict(parse_qsl(address.query)) | {"size": str(size)})
        try:
            return self.client.read(f"{address.path}?{query}")
        except ValueError as error:
            raise FetchError("NoContent", str(error)) from None

    def pieces(self, fetcher: Fetcher) -> Iterator[bytes]:
        """Yield the video's file, some MiB at a time; for an image, its largest size. `fetcher` is unused.

        Raises:
            embedder.sources.fetch.FetchError: the file is gone, can't be fetched, or changes meanwhile.
        """
        clip = self.links.get("clip")
        if clip is None:
            yield self.image_bytes(SIZES_PX[-1])
            return
        try:
            yield from self.client.pieces(clip)
        except ValueError as error:
            raise FetchError("NoContent", str(error)) from None

    def image(self, size_px: int = IMAGE_PX) -> "Image":
        """Fetch the image, or the frame in the middle of the segment.

        Args:
            size_px: side of the white square that the whole image is fitted into.

        Raises:
            embedder.sources.fetch.FetchError: the image is gone, or can't be fetched.
            embedder.media.media_errors.DecodeError: it can't be decoded.
        """
        from PIL import Image

        content = self.image_bytes(size_px)
        with SandboxedDecoder() as decoder:
            return Image.fromarray(decoder.image(content, replace(THUMBNAIL, image_size=size_px)))


class RemoteHits(Hits):
    """Hits of a query service, best first.

    Attributes:
        cursor: position of the hits that follow (`RemoteStore.more`); None if there are none.
        asked: the query, as it was sent.
        options: options of the search.
    """

    def __init__(self, hits: Iterable[RemoteHit] = (), *, query: str = "", note: str = "") -> None:
        super().__init__(hits, query=query, note=note)
        self.cursor: str | None = None
        self.asked: dict[str, Any] = {}
        self.options = SearchOptions()

    def decode_each(self, resize: ResizeSpec, num_hits: int | None = None) -> Generator[Pixels | None]:
        """Yield the pixels of the first hits (None: of all), uint8 (H, W, 3); None for an image that is gone."""
        fetch = partial(_fetch_image, size_px=resize.image_size)
        with ThreadPoolExecutor(NUM_FETCHING) as threads, SandboxedDecoder() as decoder:
            fetched = [threads.submit(fetch, hit) for hit in self[:num_hits]]
            try:
                for each in fetched:
                    content = each.result()
                    yield None if content is None else _decode_content(decoder, content, resize)
            finally:
                threads.shutdown(wait=False, cancel_futures=True)

    def cut(self, num_hits: int) -> None:
        """Keep the first hits; what follows them in another order has no next page."""
        super().cut(num_hits)
        self.cursor = None


def _fetch_image(hit: Hit, size_px: int) -> bytes | None:
    try:
        return hit.image_bytes(size_px) if isinstance(hit, RemoteHit) else None
    except FetchError:
        return None


def _decode_content(decoder: SandboxedDecoder, content: bytes, resize: ResizeSpec) -> Pixels | None:
    try:
        return decoder.image(content, resize)
    except DecodeError:
        return None


OF_HIT = {field.name for field in fields(Hit)}


def read_hits(client: HttpClient, answer: Mapping[str, Any], version: str) -> RemoteHits:
    """Read the hits of one query from the service's answer; `version` is the snapshot that answered."""
    hits = RemoteHits((_read_hit(client, each) for each in answer["hits"]), note=answer.get("note") or "")
    hits.version, hits.cursor, hits.warnings = version, answer.get("cursor"), list(answer.get("warnings") or ())
    return hits


def _read_hit(client: HttpClient, found: Mapping[str, Any]) -> RemoteHit:
    links = found["links"]
    given = {name: value for name, value in found.items() if name in OF_HIT}
    given["score"] = math.nan if given["score"] is None else given["score"]
    given["uri"] = given["uri"] or client.url + (links["image"] or links["item"])
    given["segments"] = [Segment(each["start_s"], each["end_s"], each["score"]) for each in found["segments"]]
    given["duplicates"] = [Duplicate(each["item_id"], each["score"]) for each in found["duplicates"]]
    hit = RemoteHit(**given)
    vars(hit).update(client=client, links=links)
    return hit
