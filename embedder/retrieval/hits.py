"""Search results as a list that notebooks show as pictures, and as a contact sheet."""

import base64
import html
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from embedder.media.errors import DecodeError
from embedder.media.limits import DecodeLimits
from embedder.media.resize import ResizeSpec
from embedder.media.sandbox import SandboxedDecoder
from embedder.retrieval.hit import Hit
from embedder.sources.fetch import Fetcher, FetchError
from embedder.storage.printable import printable

THUMBNAIL_PX = 160
MAX_TEXT_CHARACTERS = 500  # of a line under a picture
MAX_NAMED = 3  # other times or duplicates that a line names
THUMBNAIL = ResizeSpec(image_size=THUMBNAIL_PX, resize="pad", interpolation="lanczos", reduced_decode=True)

Pixels = np.ndarray[Any, np.dtype[np.uint8]]


class Hits(list[Hit]):
    """Hits, best first.

    Attributes:
        query: what was searched for, as a person reads it; empty for a vector.
        note: why there are none, where there are none.
        version: what answered: the run that published it, and its index.
    """

    def __init__(self, hits: Iterable[Hit] = (), *, query: str = "", note: str = "") -> None:
        super().__init__(hits)
        self.query, self.note, self.version = query, note, ""

    def thumbnails(self) -> list[Pixels | None]:
        """Each hit's picture, or the frame in the middle of its segment; uint8 (160, 160, 3), None where it is gone."""
        return read_thumbnails(self)

    def save_sheet(self, path: str | Path, title: str = "") -> None:
        """Write a contact sheet: pictures with rank, score, caption and time."""
        from embedder.media.contact_sheet import Cell, save_sheet

        cells = [Cell(pixels, describe(hit)) for pixels, hit in zip(self.thumbnails(), self, strict=True)]
        save_sheet(Path(path), cells, title)

    def _repr_html_(self) -> str:
        from embedder.media.contact_sheet import encode_png

        if not self:
            return f"<p>{_as_html(self.note)}</p>"
        figures = []
        for pixels, hit in zip(self.thumbnails(), self, strict=True):
            picture = "" if pixels is None else base64.b64encode(encode_png(pixels)).decode()
            text = "<br>".join(_as_html(line) for line in describe(hit))
            figures.append(
                f'<figure style="display:inline-block;margin:4px;width:{THUMBNAIL_PX}px;font-size:11px">'
                f'<img width="{THUMBNAIL_PX}" src="data:image/png;base64,{picture}">'
                f"<figcaption>{text}</figcaption></figure>"
            )
        return "".join(figures)


class Answers(list[Hits]):
    """The hits of several queries, in their order."""

    def _repr_html_(self) -> str:
        return "".join(f"<h4>{_as_html(hits.query)}</h4>{hits._repr_html_()}" for hits in self)


def _as_html(text: str) -> str:
    return html.escape(printable(text, MAX_TEXT_CHARACTERS))


def describe(hit: Hit) -> list[str]:
    """Up to four short lines: score and time, caption, id, what else stands for the same."""
    time = "" if hit.middle_s is None else f"  at {hit.middle_s:.1f} s"
    more = describe_more(hit)
    caption = [hit.caption] if hit.caption else []
    return [f"{hit.score:.3f}{time}", *caption, hit.item_id, *([more] if more else [])]


def describe_more(hit: Hit) -> str:
    """A video's other times and the hits folded under this one, the best few of each; empty where there are none."""
    times = [f"{each.start_s:.1f} s" for each in hit.segments if each.start_s is not None]
    items = [each.item_id for each in hit.duplicates]
    parts = [("also at", times), ("like it:", items)]
    return "; ".join(f"{name} {_first(values)}" for name, values in parts if values)


def _first(values: list[str]) -> str:
    more = f" and {len(values) - MAX_NAMED} more" if len(values) > MAX_NAMED else ""
    return ", ".join(values[:MAX_NAMED]) + more


def read_thumbnails(hits: Hits) -> list[Pixels | None]:
    """Fetch and decode the hits' pictures; what can't be read any more is None."""
    max_bytes = DecodeLimits().max_file_bytes
    thumbnails: list[Pixels | None] = []
    with SandboxedDecoder() as door, Fetcher() as fetcher:
        for hit in hits:
            try:
                with fetcher.fetch(hit.uri, max_bytes=max_bytes) as fetched:
                    thumbnails.append(_thumbnail(door, fetched.content, hit.middle_s))
            except (FetchError, DecodeError):
                thumbnails.append(None)
    return thumbnails


def _thumbnail(door: SandboxedDecoder, content: bytes | Path | None, middle_s: float | None) -> Pixels | None:
    """A picture, or a video's frame at some time; None where there is nothing."""
    if content is None:
        return None
    return door.picture(content, THUMBNAIL) if middle_s is None else door.frame_at(content, THUMBNAIL, middle_s)
