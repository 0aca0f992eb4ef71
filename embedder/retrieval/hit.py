"""One search result, and its image."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from embedder.media.errors import DecodeError
from embedder.media.limits import DecodeLimits
from embedder.media.resize import ResizeSpec
from embedder.media.sandbox import SandboxedDecoder
from embedder.sources.fetch import Fetcher, FetchError
from embedder.storage.printable import printable

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_PX = 512
THUMBNAIL = ResizeSpec(image_size=160, resize="pad", interpolation="lanczos", reduced_decode=True)

Pixels = np.ndarray[Any, np.dtype[np.uint8]]


class Segment(NamedTuple):
    """Another segment of the same video, in seconds from its start, and its cosine with the query."""

    start_s: float | None
    end_s: float | None
    score: float


class Duplicate(NamedTuple):
    """An item that looks nearly like a better hit, and its cosine with the query."""

    item_id: str
    score: float


@dataclass(frozen=True)
class Hit:
    """One image or video that was found, or one segment of a video.

    Attributes:
        score: cosine with the query, in [-1, 1].
        item_id: of the item.
        segment: number of the video's segment; 0 of an image.
        modality: image or video.
        uri: address of the file, table cell or tar member.
        start_s: start of the segment, in seconds; None of an image.
        end_s: its end.
        caption: of the item, if it has one.
        carryover: values of the columns that were carried over, by name.
        segments: of a video, its other segments, best first; empty where each is a hit of its own.
        duplicates: the hits that were folded under this one, best first.
        rank_score: in hybrid search, the fused ranks that order the hits, 1/61 + 1/61 at most.
        words_rank: in hybrid search, the rank among the captions that hold the query's words, from 1; None where it
            holds none of them.
    """

    score: float
    item_id: str
    segment: int
    modality: str
    uri: str
    start_s: float | None
    end_s: float | None
    caption: str | None
    carryover: dict[str, Any]
    segments: list[Segment] = field(default_factory=list)
    duplicates: list[Duplicate] = field(default_factory=list)
    rank_score: float | None = None
    words_rank: int | None = None

    @property
    def middle_s(self) -> float | None:
        """Middle of a video's segment, in seconds from its start; None of an image."""
        return None if self.start_s is None or self.end_s is None else (self.start_s + self.end_s) / 2

    def __str__(self) -> str:
        """One line: score, modality, item and caption, control characters as escapes."""
        return printable(f"{self.score:.3f}  {self.modality:6} {self.item_id}  {self.caption or ''}")

    def read(self) -> bytes:
        """Fetch the content of the item's file; of a video, all of it.

        Raises:
            embedder.sources.fetch.FetchError: the file is gone or can't be read.
        """
        with Fetcher() as fetcher, fetcher.fetch(self.uri, max_bytes=DecodeLimits().max_video_bytes) as fetched:
            content = fetched.content
            return content.read_bytes() if isinstance(content, Path) else content or b""

    def image(self, size_px: int = IMAGE_PX) -> "Image":
        """Fetch and decode the image, or the frame in the middle of the segment, in the sandbox.

        Args:
            size_px: side of the square that the whole image is fitted into, on white.

        Raises:
            embedder.sources.fetch.FetchError: the file is gone or can't be read.
            embedder.media.errors.DecodeError: it can't be decoded.
        """
        from PIL import Image

        (pixels,) = _decode([self], replace(THUMBNAIL, image_size=size_px))
        if isinstance(pixels, Exception):
            raise pixels
        return Image.fromarray(pixels)


def read_thumbnails(hits: Iterable[Hit]) -> list[Pixels | None]:
    """Fetch and decode the hits' images; uint8 (160, 160, 3), None where one can't be read any more."""
    return [None if isinstance(pixels, Exception) else pixels for pixels in _decode(hits, THUMBNAIL)]


def _decode(hits: Iterable[Hit], resize: ResizeSpec) -> Iterator[Pixels | FetchError | DecodeError]:
    """Pixels of each hit, or the error."""
    with SandboxedDecoder() as decoder, Fetcher() as fetcher:
        for hit in hits:
            try:
                with fetcher.fetch(hit.uri, max_bytes=decoder.limits.max_file_bytes) as fetched:
                    yield _image_or_frame(decoder, fetched.content, resize, hit)
            except (FetchError, DecodeError) as error:
                yield error


def _image_or_frame(
    decoder: SandboxedDecoder, content: bytes | Path | None, resize: ResizeSpec, hit: Hit
) -> Pixels | FetchError:
    if content is None:
        return FetchError("NoContent", f"{hit.uri}: there is no image any more")
    if hit.middle_s is None:
        return decoder.image(content, resize)
    return decoder.frame_at(content, resize, hit.middle_s)
