"""Search results: one with its image, a list that notebooks show as images, and a contact sheet."""

import base64
import html
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
THUMBNAIL = ResizeSpec(image_size=160, mode="pad", interpolation="lanczos", reduced_decode=True)
MAX_TEXT_CHARACTERS = 500  # of a line under an image
MAX_NAMED = 3  # other times or duplicates that a line names

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
        probability: that the image fits the text, where the model defines one, as SigLIP does; else None, and of other
            queries than texts.
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
    probability: float | None = None

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


class Hits(list[Hit]):
    """Hits, best first.

    Attributes:
        query: text or path searched with; empty for a vector.
        note: reason where there are none.
        version: snapshot that answered: the run that published it, and its index.
    """

    def __init__(self, hits: Iterable[Hit] = (), *, query: str = "", note: str = "") -> None:
        super().__init__(hits)
        self.query, self.note, self.version = query, note, ""

    def thumbnails(self) -> list[Pixels | None]:
        """Image of each hit, or the frame in the middle of its segment; uint8 (160, 160, 3), None where it is gone."""
        return [None if isinstance(pixels, Exception) else pixels for pixels in _decode(self, THUMBNAIL)]

    def save_sheet(self, path: str | Path, title: str = "") -> None:
        """Write a contact sheet: images with score, caption and time.

        Args:
            path: PNG file to write.
            title: above the images.
        """
        from embedder.media.contact_sheet import Cell, save_sheet

        cells = [Cell(pixels, describe(hit)) for pixels, hit in zip(self.thumbnails(), self, strict=True)]
        save_sheet(Path(path), cells, title)

    def _repr_html_(self) -> str:
        from embedder.media.contact_sheet import encode_png

        if not self:
            return f"<p>{_as_html(self.note)}</p>"
        figures = []
        for pixels, hit in zip(self.thumbnails(), self, strict=True):
            image = "" if pixels is None else base64.b64encode(encode_png(pixels)).decode()
            text = "<br>".join(_as_html(line) for line in describe(hit))
            figures.append(
                f'<figure style="display:inline-block;margin:4px;width:{THUMBNAIL.image_size}px;font-size:11px">'
                f'<img width="{THUMBNAIL.image_size}" src="data:image/png;base64,{image}">'
                f"<figcaption>{text}</figcaption></figure>"
            )
        return "".join(figures)


class Answers(list[Hits]):
    """Hits of several queries, in their order."""

    def _repr_html_(self) -> str:
        return "".join(f"<h4>{_as_html(hits.query)}</h4>{hits._repr_html_()}" for hits in self)


def _as_html(text: str) -> str:
    return html.escape(printable(text, MAX_TEXT_CHARACTERS))


def describe(hit: Hit) -> list[str]:
    """Describe a hit in up to four short lines: score and time, caption, id, other segments and duplicates."""
    time = "" if hit.middle_s is None else f"  at {hit.middle_s:.1f} s"
    more = describe_more(hit)
    caption = [hit.caption] if hit.caption else []
    return [f"{hit.score:.3f}{time}", *caption, hit.item_id, *([more] if more else [])]


def describe_more(hit: Hit) -> str:
    """Describe a video's other segments and the hits folded under this one, the best few of each."""
    times = [f"{each.start_s:.1f} s" for each in hit.segments if each.start_s is not None]
    items = [each.item_id for each in hit.duplicates]
    parts = [("also at", times), ("like it:", items)]
    return "; ".join(f"{name} {_first(values)}" for name, values in parts if values)


def _first(values: list[str]) -> str:
    more = f" and {len(values) - MAX_NAMED} more" if len(values) > MAX_NAMED else ""
    return ", ".join(values[:MAX_NAMED]) + more


def _decode(hits: Iterable[Hit], resize: ResizeSpec) -> Iterator[Pixels | FetchError | DecodeError]:
    """Pixels of each hit, or the error."""
    with SandboxedDecoder() as decoder, Fetcher() as fetcher:
        for hit in hits:
            try:
                with fetcher.fetch(hit.uri, max_bytes=decoder.limits.max_file_bytes) as fetched:
                    if fetched.content is None:
                        yield FetchError("NoContent", f"{hit.uri}: there is no image any more")
                    elif hit.middle_s is None:
                        yield decoder.image(fetched.content, resize)
                    else:
                        yield decoder.frame_at(fetched.content, resize, hit.middle_s)
            except (FetchError, DecodeError) as error:
                yield error
