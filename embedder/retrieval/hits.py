"""Search results: one with its image, a list that notebooks show as images, and a contact sheet."""

import base64
import html
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from embedder.installation import InstallationError
from embedder.media.errors import DecodeError
from embedder.media.limits import DecodeLimits
from embedder.media.resize import ResizeSpec
from embedder.media.sandbox import SandboxedDecoder
from embedder.media.sniff import HEAD_BYTES
from embedder.retrieval.queries import QueryParts
from embedder.sources.byte_ranges import EmbeddedFile, open_ranges
from embedder.sources.fetch import Fetcher, FetchError
from embedder.sources.item_ranges import check_kind, open_item
from embedder.sources.uris import TableCell, split_uri
from embedder.storage.file_adapter import ByteRanges
from embedder.storage.output_file import check_output_file
from embedder.storage.printable import printable, readable

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]
    import pyarrow as pa
    from PIL.Image import Image

    from embedder.retrieval.hit_files import CopiedFiles
    from embedder.retrieval.snapshot import EmbeddedFiles

IMAGE_PX = 512
THUMBNAIL = ResizeSpec(image_size=160, mode="pad", interpolation="lanczos", reduced_decode=True)
MAX_TEXT_CHARACTERS = 500  # of a line under an image
PIECE_BYTES = 4 << 20
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
        vector_rank: in hybrid search, the rank by vectors, from 1; None where it was found by its words alone.
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
    vector_rank: int | None = None

    files: ClassVar["EmbeddedFiles | None"] = None
    """Of the snapshot that answered, where it is known: which files are those that were embedded; no field of a hit."""

    @property
    def embedded(self) -> EmbeddedFile | None:
        """What the item's file has to be to be opened; None where any will do."""
        return None if self.files is None else self.files.of(self.item_id, self.uri, self.modality)

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
            embedder.sources.fetch.FetchError: the file is gone, can't be read, or has changed since it was embedded.
        """
        with Fetcher() as fetcher:
            return b"".join(self.pieces(fetcher))

    def pieces(self, fetcher: Fetcher) -> Iterator[bytes]:
        """Content of the item's file, some MiB at a time; of a video, all of it.

        Args:
            fetcher: that keeps open what several hits are read from.

        Raises:
            embedder.sources.fetch.FetchError: the file is gone, can't be read, has changed since it was embedded, or
                ends early.
        """
        max_bytes, embedded = DecodeLimits().max_file_bytes, self.embedded
        if not isinstance(split_uri(self.uri)[1], TableCell):
            yield from _pieces(open_item(self.uri, max_bytes=max_bytes, embedded=embedded), self.uri)
            return
        with fetcher.fetch(self.uri, max_bytes=max_bytes, embedded=embedded) as fetched:
            if isinstance(fetched.content, Path):  # which the cell names
                yield from _pieces(open_ranges(str(fetched.content)), self.uri, embedded)
            elif fetched.content is not None:
                check_kind(fetched.content[:HEAD_BYTES], self.uri, embedded)
                yield fetched.content
            else:
                raise FetchError("NoContent", f"{readable(self.uri)}: there is no image any more")

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
        query: name of the query: the text or path searched with; empty for a vector.
        note: reason where there are none.
        parts: what was searched with, and what the search stays away from.
        warnings: lines that say why the hits may not be what the query asks for, as where the model knows none of its
            words.
        version: snapshot that answered: the run that published it, and its index.
        carried: names and types of the columns that were carried over; None where they are not known.
    """

    def __init__(self, hits: Iterable[Hit] = (), *, query: str = "", note: str = "") -> None:
        super().__init__(hits)
        self.query, self.note, self.version = query, note, ""
        self.parts = QueryParts()
        self.warnings: list[str] = []
        self.carried: pa.Schema | None = None

    def to_arrow(self) -> "pa.Table":
        """Hits as an Arrow table: `rank` from 1, the fields of `Hit`, and a column for each one carried over.

        A carried column with the name of a field is called `carryover.NAME`. Where the types of the carried columns
        aren't known, as from a query service, they are those of the values.
        """
        from embedder.retrieval.hit_table import hit_table

        return hit_table([self], has_queries=False)

    def to_pandas(self) -> "pandas.DataFrame":
        """Hits as a data frame, with the columns of `to_arrow`.

        Raises:
            InstallationError: pandas is not installed.
        """
        _require_pandas("Hits.to_pandas")
        return self.to_arrow().to_pandas()

    def thumbnails(self) -> list[Pixels | None]:
        """Image of each hit, or the frame in the middle of its segment; uint8 (160, 160, 3), None where it is gone."""
        return [None if isinstance(pixels, Exception) else pixels for pixels in _decode(self, THUMBNAIL)]

    def save_sheet(self, path: str | Path, title: str = "") -> None:
        """Write a contact sheet: images with score, caption and time, behind the image that was searched with.

        Args:
            path: file to write, in the format that its suffix names: .png, .jpg, .webp or .pdf.
            title: above the images.

        Raises:
            ConfigError: the suffix names another format, the folder is missing, or there are too many hits.
        """
        _save_sheet(path, [(self, title)])

    def save(self, path: str | Path) -> None:
        """Write the hits as a table, in the format that the suffix names: .csv, .parquet or .jsonl.

        The columns are those of `to_arrow`. In a CSV file a text that a spreadsheet would take for a formula begins
        with an apostrophe.

        Raises:
            ConfigError: the suffix names another format, or the folder is missing.
        """
        from embedder.retrieval.hit_files import save_table

        save_table(Path(path), self.to_arrow())

    def copy_files(self, folder: str | Path) -> "CopiedFiles":
        """Copy the file of each hit into a new folder, as `001-name.jpg` by rank, beside `hits.csv`, which names them.

        A video is copied whole, once. From a query service come its videos, and images as it makes them.

        Raises:
            ConfigError: the folder holds something already, its parent is missing, or it can't be written.
        """
        from embedder.retrieval.hit_files import copy_files

        return copy_files(Path(folder), [self])

    def _repr_html_(self) -> str:
        from embedder.media.contact_sheet import encode_png

        lines = [*self.warnings, *([] if self else [self.note])]
        figures = [f"<p>{_as_html(line)}</p>" for line in lines]
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

    def to_arrow(self) -> "pa.Table":
        """Hits of all queries as one Arrow table: `Hits.to_arrow` behind `query_number`, from 0, and `query`."""
        from embedder.retrieval.hit_table import hit_table

        return hit_table(self, has_queries=True)

    def to_pandas(self) -> "pandas.DataFrame":
        """Hits of all queries as one data frame, with the columns of `to_arrow`.

        Raises:
            InstallationError: pandas is not installed.
        """
        _require_pandas("Answers.to_pandas")
        return self.to_arrow().to_pandas()

    def save_sheet(self, path: str | Path) -> None:
        """Write a contact sheet with a block for each query: its name, its image, its hits; see `Hits.save_sheet`."""
        _save_sheet(path, [(hits, hits.query) for hits in self])

    def save(self, path: str | Path) -> None:
        """Write the hits of all queries as a table, with the columns of `to_arrow`; see `Hits.save`."""
        from embedder.retrieval.hit_files import save_table

        save_table(Path(path), self.to_arrow())

    def copy_files(self, folder: str | Path) -> "CopiedFiles":
        """Copy the files of all hits, those of the first query as `q1-001-name.jpg`; see `Hits.copy_files`."""
        from embedder.retrieval.hit_files import copy_files

        return copy_files(Path(folder), self)

    def _repr_html_(self) -> str:
        return "".join(f"<h4>{_as_html(hits.query)}</h4>{hits._repr_html_()}" for hits in self)


def _save_sheet(path: str | Path, titled: Sequence[tuple[Hits, str]]) -> None:
    from embedder.media.contact_sheet import SHEET_FORMATS, Block, Cell, save_sheet

    check_output_file(Path(path), SHEET_FORMATS, "contact sheet")
    blocks = []
    for hits, title in titled:
        cells = [Cell(pixels, describe(hit)) for pixels, hit in zip(hits.thumbnails(), hits, strict=True)]
        image = hits.parts.image
        query = None if image is None else Cell(_query_pixels(image), ["query"])
        blocks.append(Block(cells, title, query, hits.note))
    save_sheet(Path(path), blocks)


def _query_pixels(image: Path | bytes) -> Pixels | None:
    """Image that was searched with, uint8 (160, 160, 3); None where it is gone since."""
    with SandboxedDecoder() as decoder:
        try:
            return decoder.image(image, THUMBNAIL)
        except DecodeError:
            return None


def _require_pandas(where: str) -> None:
    if find_spec("pandas") is None:
        raise InstallationError(
            f"{where}: needs pandas, which this installation lacks; pip install pandas, or use to_arrow()"
        )


def _pieces(ranges: ByteRanges, uri: str, embedded: EmbeddedFile | None = None) -> Iterator[bytes]:
    with closing(ranges):
        check_kind(ranges.read_at(0, HEAD_BYTES) if embedded is not None else b"", uri, embedded)
        start = 0
        while start < ranges.size:
            piece = ranges.read_at(start, PIECE_BYTES)
            if not piece:
                raise FetchError("Truncated", f"{readable(uri)}: it ends after {start:,} of {ranges.size:,} bytes")
            yield piece
            start += len(piece)


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
    hits = list(hits)
    with SandboxedDecoder() as decoder, Fetcher() as fetcher:
        max_bytes = decoder.limits.max_file_bytes
        with fetcher.ahead([hit.uri for hit in hits], max_bytes=max_bytes):
            for hit in hits:
                try:
                    with fetcher.fetch(hit.uri, max_bytes=max_bytes, embedded=hit.embedded) as fetched:
                        if fetched.content is None:
                            yield FetchError("NoContent", f"{hit.uri}: there is no image any more")
                        elif hit.middle_s is None:
                            yield decoder.image(fetched.content, resize)
                        else:
                            yield decoder.frame_at(fetched.content, resize, hit.middle_s)
                except (FetchError, DecodeError) as error:
                    yield error
