"""Reads the content of listed items: its kind by the first bytes, its caption, and a hash of both."""

import hashlib
from pathlib import Path

from embedder.batch_schema import OTHER_FILE, UNREADABLE_KIND
from embedder.media.sandbox import SandboxedDecoder
from embedder.media.sniff import HEAD_BYTES, is_own_sheet, may_be_animated, other_kind, sniff, unreadable_kind
from embedder.sources.fetch import Fetched, Fetcher, FetchError
from embedder.sources.file_names import UNREADABLE_SUFFIXES, suffix_of
from embedder.sources.source_errors import from_os_error
from embedder.sources.uris import name_in
from embedder.steps.item_captions import CaptionReader
from embedder.steps.item_decoder import DecodeSpec, ItemContent, ItemProblem, Values

CAPTION_FILES = (".txt", ".json")  # other text (a playlist, a program) is no caption
CONVERT = "convert it to JPEG (a clip to MP4), and the next run embeds it"
READ_BYTES = 4 << 20  # a local file up to this size is read only once, for its kind, its hash and decoding


class ContentReader:
    """Fetches listed items, and says what their vectors are made from."""

    def __init__(self, spec: DecodeSpec, sandbox: SandboxedDecoder) -> None:
        self.spec = spec
        self.fetcher = Fetcher(spec.web)
        self.captions = CaptionReader(spec, sandbox)

    def close(self) -> None:
        """Close all open files."""
        self.fetcher.close()

    def fetch(self, uri: str) -> Fetched:
        """Fetch an item within the limits; raises a FetchError."""
        limits = self.spec.limits
        return self.fetcher.fetch(
            uri,
            max_bytes=limits.max_file_bytes,
            max_file_bytes=limits.max_video_bytes,
            max_read_bytes=READ_BYTES,
        )

    def read(self, item: Values, fetched: Fetched) -> ItemContent:
        """Classify the item by its first bytes; a text file without an image is a caption."""
        if fetched.content is None:
            return ItemContent("text", None, *self.captions.read(item, None))
        head = _head(fetched.content)
        kind: str | None = sniff(head)
        if kind == "text" and item["uri"].lower().endswith(CAPTION_FILES):
            return _caption_content(item, *self.captions.read_alone(item["uri"]))
        found = self.captions.read(item, fetched.content, kind)
        if is_own_sheet(head):
            problem = ItemProblem("decode", OTHER_FILE, "a contact sheet of a search")
            return ItemContent(None, None, found.caption, problem)
        if kind == "image" and self.spec.animations == "clip" and may_be_animated(head):
            kind = "animation"
        if kind in ("image", "animation", "video"):
            return ItemContent(kind, fetched.content, *found)
        return ItemContent(None, None, found.caption, no_media(item, head))

    def file_hash(self, fetched: Fetched, content: ItemContent) -> str | None:
        """Hash the item's file; None if there is nothing to hash, or it is too large to be decoded."""
        if content.media is None and not content.caption:
            return None
        is_image = content.kind in ("image", "animation") and fetched.size_bytes > self.spec.limits.max_file_bytes
        return None if is_image else self.fetcher.content_hash(fetched)

    def version(self, file_hash: str | None, content: ItemContent, item: Values) -> str | None:
        """Hash the content that the item's vectors are made from; None if there is nothing to hash."""
        if content.media is None and not content.caption:
            return None
        media_hash = "too large" if file_hash is None else file_hash
        if content.kind == "animation":  # only the first frame has another vector
            media_hash += " as a clip"
        if self.spec.steps is not None and self.spec.steps.carried:  # another value gives another result
            media_hash += repr([item.get(name) for name in self.spec.steps.carried])
        return content_version(media_hash, content.caption)

    def version_of(self, item: Values) -> str | None:
        """Read an item only for its `version`; None if it is too large, or something of it can't be read."""
        try:
            with self.fetch(item["uri"]) as fetched:
                content = self.read(item, fetched)
                file_hash = self.file_hash(fetched, content) if content.problem is None else None
                return None if file_hash is None else self.version(file_hash, content, item)
        except FetchError:
            return None


def _caption_content(item: Values, caption: str | None, problem: ItemProblem | None) -> ItemContent:
    """Return a caption without an image; a `.json` without a caption is another file unless it must have one."""
    is_claimed = item.get("is_media") is not False or (problem is not None and problem.transient)
    if not caption and not is_claimed:
        return ItemContent(
            None, None, None, ItemProblem("decode", OTHER_FILE, "a file without a caption that belongs to none")
        )
    return ItemContent("text", None, caption, problem)


def no_media(item: Values, head: bytes) -> ItemProblem:
    """Return why an item whose bytes are no readable image, video or caption is left out or rejected."""
    if not head:
        error_type = OTHER_FILE if item.get("is_media") is False else "EmptyFile"
        return ItemProblem("decode", error_type, "the file is empty")
    kind = unreadable_kind(head) or UNREADABLE_SUFFIXES.get(suffix_of(name_in(item["uri"])))
    if kind is not None:
        return ItemProblem("decode", UNREADABLE_KIND, f"{kind}: this version can't read that kind; {CONVERT}")
    error_type = OTHER_FILE if item.get("is_media") is False else "UnknownKind"
    return ItemProblem("decode", error_type, f"neither an image, a video nor a caption: {other_kind(head)}")


def content_version(media_hash: str, caption: str | None) -> str:
    """Hash everything that an item's vectors are made from."""
    return hashlib.blake2b(f"{media_hash}\n{caption or ''}".encode(), digest_size=16).hexdigest()


def _head(content: bytes | Path) -> bytes:
    if isinstance(content, bytes):
        return content[:HEAD_BYTES]
    try:
        with content.open("rb") as file:
            return file.read(HEAD_BYTES)
    except OSError as error:
        raise from_os_error(error, str(content)) from None
