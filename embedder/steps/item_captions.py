"""Captions of items, by the places of `[captions] from`: files next to an image, then what stands in the image."""

import json
from collections.abc import Collection, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from embedder.media.caption_text import clean_keywords
from embedder.media.media_errors import DecodeError
from embedder.media.sandbox import SandboxedDecoder
from embedder.sources.byte_ranges import open_ranges
from embedder.sources.captions import GIVEN, IN_MEDIA, read_caption, read_takeout
from embedder.sources.item_ranges import BytesRanges
from embedder.sources.source_errors import FetchError
from embedder.steps.item_decoder import DecodeSpec, ItemProblem
from embedder.storage.file_adapter import ByteRanges
from embedder.storage.printable import readable

Values = dict[str, Any]


class FoundCaption(NamedTuple):
    """Caption of an item and where it was found, the first problem on the way, and values of the medium next to it."""

    caption: str | None
    problem: ItemProblem | None = None
    beside: Mapping[str, Any] = {}
    place: str | None = None


def read_problem(error: FetchError) -> ItemProblem:
    """Return a failed read's problem; transient for a missing file, as only the next listing shows if it is gone."""
    return ItemProblem("read", error.error_type, error.message, error.transient or error.error_type == "FileNotFound")


class CaptionReader:
    """Reads the captions of items; what is in images, clips and XMP is read by the sandbox."""

    def __init__(self, spec: DecodeSpec, sandbox: SandboxedDecoder) -> None:
        self._places, self._languages = spec.caption_places, spec.caption_languages
        self._sandbox = sandbox

    def read(self, item: Mapping[str, Any], media: bytes | Path | None, kind: str | None = "image") -> FoundCaption:
        """Read an item's caption; one that a table, a tar or a join gives comes before all places.

        What can't be read is a problem, and the next place is tried; but after a temporary one the caption stays
        missing until the next attempt. `media` is the item's file, in which the places of its `kind` are looked for.
        """
        caption, problem, values = item["caption"], None, Values()
        found_in, in_media = (GIVEN if caption else None), IN_MEDIA.get(kind or "", ())
        described_by = json.loads(item.get("described_by") or "{}")
        in_file: Mapping[str, str] | None = None
        for place in self._places:
            try:
                if place == "sidecar" and item["caption_uri"] is not None:
                    caption = caption or read_caption(item["caption_uri"])
                elif place == "imagefolder":
                    caption = caption or described_by.get(place)
                elif place in described_by:
                    found, more = self._read_beside(place, described_by[place])
                    caption, values = caption or found, more | values
                if place in in_media and media is not None and not caption:
                    in_file = self._read_file(media) if in_file is None else in_file
                    caption = in_file.get(place)
            except FetchError as error:
                problem = problem or read_problem(error)
            except DecodeError as error:  # a picture that is broken says so when it is decoded
                in_file = {}
                if error.transient and problem is None:
                    problem = ItemProblem("read", error.error_type, error.message, transient=True)
            found_in = found_in or (place if caption else None)
            if problem is not None and problem.transient and not caption:
                break
        return FoundCaption(caption, problem, values, found_in)

    def read_alone(self, uri: str) -> tuple[str | None, ItemProblem | None]:
        """Read a caption file that is an item itself."""
        try:
            return read_caption(uri), None
        except FetchError as error:
            return None, read_problem(error)

    def _read_beside(self, place: str, uri: str) -> tuple[str, Values]:
        """Read a file next to an image; raises a FetchError."""
        if place == "takeout":
            return read_takeout(uri)
        with closing(open_ranges(uri)) as ranges:
            try:
                captions, keywords = self._read_texts(ranges)
            except DecodeError as error:
                where = f"{readable(uri)}: no valid XMP ({error.error_type}: {error.message})"
                raise FetchError("CaptionBroken", where, error.transient) from None
        return captions.get(place, ""), {"keywords": keywords} if keywords else {}

    def _read_file(self, media: bytes | Path) -> dict[str, str]:
        with closing(BytesRanges(media) if isinstance(media, bytes) else open_ranges(str(media))) as ranges:
            return self._read_texts(ranges)[0]

    def _read_texts(self, ranges: ByteRanges) -> tuple[dict[str, str], list[str]]:
        """Return the captions by place, and the keywords, that the sandbox finds; raises a DecodeError."""
        found = self._sandbox.header(ranges, self._languages)
        captions = found.get("captions")
        by_place = captions.items() if isinstance(captions, dict) else ()
        return {place: text for place, text in by_place if isinstance(text, str)}, _strings(found.get("keywords"))


def _strings(found: Any) -> list[str]:
    """Return the strings of a list that the sandbox has sent, which may send anything."""
    return [each for each in found if isinstance(each, str)] if isinstance(found, list) else []


def add_values(medium: Values, beside: Mapping[str, Any], columns: Collection[str]) -> Values:
    """Add what files next to a picture say to what its own says, which comes first; keywords are joined."""
    wanted = {name: value for name, value in beside.items() if name in columns}
    if "taken_at" in medium:
        wanted = {name: value for name, value in wanted.items() if name not in ("taken_at", "taken_offset_min")}
    if "latitude" in medium:
        wanted = {name: value for name, value in wanted.items() if name not in ("latitude", "longitude", "altitude_m")}
    if "keywords" in wanted:
        wanted["keywords"] = clean_keywords([*_strings(medium.get("keywords")), *wanted["keywords"]])
    return medium | wanted
