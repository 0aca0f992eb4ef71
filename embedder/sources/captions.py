"""Captions in files: plain text, or one key of a JSON object."""

from contextlib import closing
from typing import Any

from embedder.sources.byte_ranges import open_ranges
from embedder.sources.errors import FetchError
from embedder.sources.type_inference import clean_text
from embedder.sources.uris import TarMember, split_uri
from embedder.storage.printable import readable
from shards.schema import parse_json

MAX_CAPTION_BYTES = 1 << 20
# No `title`: exports of photo services put the file's name there.
JSON_KEYS = ("caption", "text")


def read_caption(caption_uri: str) -> str:
    """Read a caption file; `.json` by its name, anything else as text. An empty string means that it holds none.

    Raises:
        FetchError: the file is missing, larger than 1 MiB, not UTF-8, or broken JSON.
    """
    path, part = split_uri(caption_uri)
    with closing(open_ranges(path)) as ranges:
        name, offset, size = part if isinstance(part, TarMember) else (path, 0, ranges.size)
        if size > MAX_CAPTION_BYTES:
            raise FetchError("TooLarge", f"{caption_uri}: a caption of {size:,} bytes; 1 MiB is the limit")
        data = ranges.read_at(offset, size)
    if name.lower().endswith(".json"):
        return caption_in(json_object(data, caption_uri), caption_uri)
    return decode_text(data, caption_uri)


def decode_text(data: bytes, where: str) -> str:
    """Decode a caption; a byte order mark and the space around it are dropped.

    Raises:
        FetchError: it is not UTF-8.
    """
    try:
        return data.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        message = f"{readable(where)}: the caption is not UTF-8 at byte {error.start}; save it as UTF-8"
        raise FetchError("CaptionNotUtf8", message) from None


def json_object(data: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        FetchError: it is not UTF-8, or no JSON object.
    """
    text = decode_text(data, where)
    try:
        tree = parse_json(text)
    except ValueError as error:
        raise FetchError("CaptionBroken", f"{readable(where)}: no valid JSON ({error})") from None
    if not isinstance(tree, dict):
        raise FetchError("CaptionBroken", f"{readable(where)}: a {type(tree).__name__} where a JSON object is due")
    return tree


def caption_in(tree: dict[str, Any], where: str) -> str:
    """Take `caption`, else `text`; an empty string where the object has neither.

    Raises:
        FetchError: the caption is no string.
    """
    value = next((tree[key] for key in JSON_KEYS if tree.get(key) is not None), "")
    if not isinstance(value, str):
        raise FetchError("CaptionBroken", f"{readable(where)}: the caption is a {type(value).__name__}, not a string")
    return clean_text(value).strip()
