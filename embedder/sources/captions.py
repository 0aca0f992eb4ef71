"""Captions in files: plain text, or one key of a JSON object."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from embedder.media.caption_text import clean_caption
from embedder.media.sniff import encoding_of
from embedder.sources.byte_ranges import open_ranges
from embedder.sources.source_errors import FetchError
from embedder.sources.takeout import medium_values
from embedder.sources.type_inference import make_storable
from embedder.sources.uris import TarMember, split_uri
from embedder.storage.printable import readable
from shards.file_schema import parse_json

MAX_CAPTION_BYTES = 1 << 20
SIDECAR_ALONE = ("sidecar",)
IN_MEDIA = {"image": ("xmp", "iptc", "exif"), "video": ("clip",)}
"""Places of `[captions] from` that are in the metadata of a file, by its kind."""
IN_FILES = tuple(place for places in IN_MEDIA.values() for place in places)
GIVEN = "given"
"""Stands for the place of captions that come with the listing: of a table, a tar or a join."""
PLACES_MARK = "|captions:"
"""Precedes in `modified` the places in which captions of the item are looked for."""
JSON_KEYS = ("caption", "text", "description", "alt_text", "alt", "prompt")
"""Keys of a `.json` that may hold its caption; the first non-null one counts. `title` is missing because photo services
export the file's name there.
"""


@dataclass(frozen=True)
class CaptionRules:
    """Rules for the caption files of a folder.

    `alone`: a caption without an image or video is an item. `is_kept` takes an item id and decides whether such a
    caption stays in any case: True, as an item of the store; False, as a record that it is no item; None, the store
    doesn't know it. `columns`: keys of `.json` files whose values are carried over. `places` and `languages`: as in
    `[captions]`, `from` and `languages`.
    """

    alone: bool = True
    is_kept: Callable[[str], bool | None] | None = None
    columns: tuple[str, ...] = ()
    places: tuple[str, ...] = SIDECAR_ALONE
    languages: tuple[str, ...] = ()

    @property
    def mark(self) -> str:
        """Return what `modified` says of the places; another one makes a run look at the items again."""
        languages = self.languages if "xmp" in self.places else ()
        return ";".join([",".join(self.places), *languages])


ANY_CAPTION = CaptionRules()


def read_caption(caption_uri: str) -> str:
    """Read a caption file, as JSON if its name ends in `.json`, else as text; empty if it holds no caption.

    Raises a FetchError if the file is missing, larger than 1 MiB, not UTF-8, or broken JSON.
    """
    path, part = split_uri(caption_uri)
    name, data = _content(caption_uri, path, part if isinstance(part, TarMember) else None)
    if name.lower().endswith(".json"):
        return caption_in(json_object(data, caption_uri), caption_uri)
    return decode_text(data, caption_uri)


def read_takeout(uri: str) -> tuple[str, dict[str, Any]]:
    """Read Takeout's `.json`: the description, empty if nobody wrote it, and values of the medium's columns.

    Raises a FetchError if the file is missing, larger than 1 MiB, not UTF-8, or not a JSON object.
    """
    tree = json_object(_content(uri, uri, None)[1], uri)
    caption = tree.get("description")
    return clean_caption(caption) if isinstance(caption, str) else "", medium_values(tree)


def read_values(json_uri: str, keys: Sequence[str]) -> dict[str, Any]:
    """Read some values of an item's `.json`; keys that it lacks are left out.

    Raises a FetchError if the file is missing, larger than 1 MiB, not UTF-8, or not a JSON object.
    """
    _, data = _content(json_uri, json_uri, None)
    tree = json_object(data, json_uri)
    return {key: tree[key] for key in keys if key in tree}


def _content(uri: str, path: str, member: TarMember | None) -> tuple[str, bytes]:
    with closing(open_ranges(path)) as ranges:
        name, offset, size = member or (path, 0, ranges.size)
        if size > MAX_CAPTION_BYTES:
            raise FetchError("TooLarge", f"{uri}: a caption of {size:,} bytes; 1 MiB is the limit")
        return name, ranges.read_at(offset, size)


def decode_text(data: bytes, where: str) -> str:
    """Decode a caption without its byte order mark and surrounding space.

    Raises a FetchError if it isn't UTF-8, or what its mark names.
    """
    encoding = encoding_of(data)
    try:
        return data.decode(encoding).strip()
    except UnicodeDecodeError as error:
        name = encoding.removesuffix("-sig").upper()
        message = f"{readable(where)}: the caption is not {name} at byte {error.start}; save it as UTF-8"
        raise FetchError("CaptionNotUtf8", message) from None


def json_object(data: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object; a FetchError if it isn't UTF-8 or not an object."""
    text = decode_text(data, where)
    try:
        tree = parse_json(text)
    except ValueError as error:
        raise FetchError("CaptionBroken", f"{readable(where)}: no valid JSON ({error})") from None
    if not isinstance(tree, dict):
        raise FetchError("CaptionBroken", f"{readable(where)}: a {type(tree).__name__} where a JSON object is due")
    return tree


def caption_in(tree: dict[str, Any], where: str) -> str:
    """Return the first value of `JSON_KEYS` that isn't null, or an empty string; a FetchError if it is no string."""
    value = next((tree[key] for key in JSON_KEYS if tree.get(key) is not None), "")
    if not isinstance(value, str):
        raise FetchError("CaptionBroken", f"{readable(where)}: the caption is a {type(value).__name__}, not a string")
    return make_storable(value).strip()
