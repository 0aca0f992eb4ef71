"""A search hit: what was found, its file, its image."""

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from embedder.media.decoder_process import Pixels
from embedder.media.limits import DecodeLimits
from embedder.media.media_errors import DecodeError
from embedder.media.resize import ResizeSpec
from embedder.media.sandbox import SandboxedDecoder
from embedder.media.sniff import HEAD_BYTES
from embedder.retrieval.cities import nearest_city
from embedder.sources.byte_ranges import EmbeddedFile, open_ranges
from embedder.sources.fetch import Fetcher, FetchError
from embedder.sources.item_ranges import check_kind, open_item
from embedder.sources.uris import TableCell, split_uri
from embedder.storage.file_adapter import ByteRanges
from embedder.storage.printable import printable, readable

if TYPE_CHECKING:
    from PIL.Image import Image

    from embedder.retrieval.row_metadata import EmbeddedFiles

IMAGE_PX = 512
THUMBNAIL = ResizeSpec(image_size=160, mode="pad", interpolation="lanczos", reduced_decode=True)
PIECE_BYTES = 4 << 20
MAX_NAMED = 3  # other times or duplicates named in a line


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
    """An image, a video, or a segment of a video that was found.

    Attributes:
        score: cosine with the query, in [-1, 1]; NaN if nothing was searched for.
        item_id: id of the item.
        segment: number of the video's segment; 0 for an image.
        modality: image or video.
        uri: address of the file, table cell or tar member.
        start_s: start of the segment, in seconds; None for an image.
        end_s: its end.
        caption: caption of the item, if it has one.
        carryover: values of the carried columns, by name.
        segments: other segments of the video, best first; empty if each segment is its own hit.
        duplicates: hits that were folded under this one, best first.
        rank_score: in hybrid search, the fused score that orders the hits, at most 1/61 + 1/61.
        words_rank: in hybrid search, the rank from 1 among captions that contain the query's words; None if it
            contains none of them.
        vector_rank: in hybrid search, the rank by vectors, from 1; None if found only by its words.
        probability: that the image fits the text, for text queries of a model that defines one, as SigLIP does; else
            None.
        rerank_score: score of the re-ranker, which orders the hits that it scored; None without one.
        medium: what the item's file says of itself, by column (`docs/metadata.md`); only what it has.
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
    rerank_score: float | None = None
    medium: dict[str, Any] = field(default_factory=dict)

    files: ClassVar["EmbeddedFiles | None"] = None
    """Files of the snapshot that answered, if known, to find whether a file has changed; not a field of a hit."""

    @property
    def embedded(self) -> EmbeddedFile | None:
        """What the item's file must be to be opened; None if any file will do."""
        return None if self.files is None else self.files.of(self.item_id, self.uri, self.modality)

    @property
    def middle_s(self) -> float | None:
        """Middle of a video's segment, in seconds from its start; None for an image."""
        return None if self.start_s is None or self.end_s is None else (self.start_s + self.end_s) / 2

    @property
    def place(self) -> str | None:
        """City nearest to where the item was made, as `Lisbon, PT`; None if that isn't known (extra `places`)."""
        return nearest_city(self.medium.get("latitude"), self.medium.get("longitude"))

    def __str__(self) -> str:
        """Return one line: score, if any, modality, item and caption, with control characters escaped."""
        score = "" if math.isnan(self.score) else f"{self.score:.3f}  "
        return printable(f"{score}{self.modality:6} {self.item_id}  {self.caption or ''}")

    def read(self) -> bytes:
        """Fetch the content of the item's file; for a video, the whole file.

        Raises:
            embedder.sources.fetch.FetchError: the file is gone, can't be read, or has changed since it was embedded.
        """
        with Fetcher() as fetcher:
            return b"".join(self.pieces(fetcher))

    def pieces(self, fetcher: Fetcher) -> Iterator[bytes]:
        """Yield the content of the item's whole file, some MiB at a time; `fetcher` keeps files that hits share open.

        Raises:
            embedder.sources.fetch.FetchError: the file is gone, can't be read, has changed since it was embedded, or
                ends early.
        """
        max_bytes, embedded = DecodeLimits().max_file_bytes, self.embedded
        if not isinstance(split_uri(self.uri)[1], TableCell):
            yield from _pieces(open_item(self.uri, max_bytes=max_bytes, embedded=embedded), self.uri)
            return
        with fetcher.fetch(self.uri, max_bytes=max_bytes, embedded=embedded) as fetched:
            if isinstance(fetched.content, Path):  # named by the cell
                yield from _pieces(open_ranges(str(fetched.content)), self.uri, embedded)
            elif fetched.content is not None:
                check_kind(fetched.content[:HEAD_BYTES], self.uri, embedded)
                yield fetched.content
            else:
                raise FetchError("NoContent", f"{readable(self.uri)}: there is no image any more")

    def image(self, size_px: int = IMAGE_PX) -> "Image":
        """Fetch and decode the image, or the frame in the middle of the segment, in the sandbox.

        Args:
            size_px: side of the white square that the whole image is fitted into.

        Raises:
            embedder.sources.fetch.FetchError: the file is gone or can't be read.
            embedder.media.media_errors.DecodeError: it can't be decoded.
        """
        from PIL import Image

        (pixels,) = decode_hits([self], replace(THUMBNAIL, image_size=size_px))
        if isinstance(pixels, Exception):
            raise pixels
        return Image.fromarray(pixels)


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


def describe(hit: Hit) -> list[str]:
    """Describe a hit in up to four short lines: score, time and place, caption, id, other segments and duplicates."""
    score = "" if math.isnan(hit.score) else f"{hit.score:.3f}"
    time = "" if hit.middle_s is None else f"at {hit.middle_s:.1f} s"
    first = "  ".join(filter(None, (score, time, hit.place)))
    return [*filter(None, (first, hit.caption)), hit.item_id, *filter(None, (describe_more(hit),))]


def describe_more(hit: Hit) -> str:
    """Describe the best few of a video's other segments and of the hits folded under this one."""
    times = [f"{each.start_s:.1f} s" for each in hit.segments if each.start_s is not None]
    items = [each.item_id for each in hit.duplicates]
    parts = [("also at", times), ("like it:", items)]
    return "; ".join(f"{name} {_first(values)}" for name, values in parts if values)


def _first(values: list[str]) -> str:
    more = f" and {len(values) - MAX_NAMED} more" if len(values) > MAX_NAMED else ""
    return ", ".join(values[:MAX_NAMED]) + more


def decode_hits(
    hits: Iterable[Hit], resize: ResizeSpec, decoder: SandboxedDecoder | None = None, fetcher: Fetcher | None = None
) -> Iterator[Pixels | FetchError | DecodeError]:
    """Yield the pixels of each hit, or the error; a decoder and a fetcher that are given stay open."""
    hits = list(hits)
    with ExitStack() as own:
        decoder = own.enter_context(SandboxedDecoder()) if decoder is None else decoder
        fetcher = own.enter_context(Fetcher()) if fetcher is None else fetcher
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
