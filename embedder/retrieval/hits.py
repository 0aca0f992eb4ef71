"""Search results as a list that notebooks show as images, and as a contact sheet."""

import base64
import html
from collections.abc import Iterable
from pathlib import Path

from embedder.retrieval.hit import THUMBNAIL, Hit, Pixels, read_thumbnails
from embedder.storage.printable import printable

MAX_TEXT_CHARACTERS = 500  # of a line under an image
MAX_NAMED = 3  # other times or duplicates that a line names


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
        return read_thumbnails(self)

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
