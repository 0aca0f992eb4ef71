"""WebDataset tars as items: members of one key are one item, found by its byte range in the tar.

Source: "The WebDataset Format" (github.com/webdataset/webdataset, README and `tariterators.py`): a key is the member's
path up to the first dot of its base name. Unlike there, the members of a key need not be adjacent, and nothing is
skipped silently.
"""

import posixpath
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from embedder.config_toml.run_sections import SourceConfig
from embedder.errors import SourceError
from embedder.quantities import plural
from embedder.sources.byte_ranges import open_ranges
from embedder.sources.captions import MAX_CAPTION_BYTES, caption_in, decode_text, json_object
from embedder.sources.file_names import sort_of, words
from embedder.sources.globbing import GlobMatches
from embedder.sources.listing_schema import Listing, Row, RowWithValues, list_with_values
from embedder.sources.local_listing import Entry
from embedder.sources.selection import LeftOut, Selection, find_selected
from embedder.sources.source_errors import FetchError, listing_errors
from embedder.sources.tar_scan import PACKED_TAR_SUFFIXES, BrokenTarError, Member, compression_of, scan_members
from embedder.sources.uris import member_uri, row_uri
from embedder.storage.file_adapter import ByteRanges
from embedder.storage.printable import is_text, readable

# The member that is the item if a key has several; extensions not listed come last, and content decides.
MEDIA_ORDER = (
    *("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "avif"),
    *("mp4", "mov", "mkv", "webm", "avi", "mpg", "mts", "m2ts", "wmv", "flv"),
)
# Extensions that accompany an item and are never one: WebDataset's names for labels, texts, arrays and pickles.
COMPANIONS = words(
    # labels and texts
    "cls cls2 index inx id txt text transcript md html",
    # trees and tables
    "json jsonl yaml yml xml csv tsv",
    # arrays and pickles
    "npy npz ten tb mp msg pyd pickle pkl pth pt",
)


class MemberProblem(NamedTuple):
    """A member that can't be used, and the reason."""

    member: Member
    error_type: str
    error: str


@dataclass
class TarSample:
    """Members of one key, gathered while the headers are read.

    `media` has candidates for the item, by rank. `text` is the `.txt` caption, `json_caption` the one in `.json`.
    `metadata` has the wanted values of `.json`. `json_problems` are kept separately, since they matter only if
    something of the `.json` is wanted.
    """

    media: list[tuple[int, Member]] = field(default_factory=list)
    text: str | None = None
    json_caption: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    has_json: bool = False
    json_problems: list[MemberProblem] = field(default_factory=list)

    @property
    def caption(self) -> str | None:
        """Return the caption; `.txt` takes precedence over `.json`."""
        return self.text or self.json_caption or None

    def ranked_media(self) -> list[Member]:
        """Return the candidates by rank; members of one rank keep the tar's order."""
        return [member for _, member in sorted(self.media, key=lambda ranked: ranked[0])]


@dataclass
class Samples:
    """All keys of one tar; `wanted` names the values to keep of each `.json`."""

    wanted: tuple[str, ...] = ()
    by_key: dict[str, TarSample] = field(default_factory=dict)
    problems: list[MemberProblem] = field(default_factory=list)

    def take(self, member: Member, ranges: ByteRanges) -> None:
        """Add one member to its key; captions and metadata are read at once, while their block is in memory."""
        if member.kind == "a folder" or sort_of(member.name) == "junk":
            return
        if problem := _name_problem(member):
            self.problems.append(problem)
            return
        key, extension = split_key(member.name)
        sample = self.by_key.setdefault(key, TarSample())
        if extension.rpartition(".")[2] not in COMPANIONS:
            sample.media.append((_media_rank(extension), member))
        elif extension == "txt":
            self._take_text(member, sample, ranges)
        elif extension == "json":
            self._take_json(member, sample, ranges)

    def _take_text(self, member: Member, sample: TarSample, ranges: ByteRanges) -> None:
        if sample.text is not None:
            self.problems.append(
                MemberProblem(member, "ExtraMember", "a second .txt under one key; the first is the caption")
            )
            return
        try:
            sample.text = decode_text(_read_small(member, ranges), member.name)
        except FetchError as error:
            self.problems.append(MemberProblem(member, error.error_type, error.message))

    def _take_json(self, member: Member, sample: TarSample, ranges: ByteRanges) -> None:
        if sample.has_json:
            error = "a second .json under one key; only the first is read"
            sample.json_problems.append(MemberProblem(member, "ExtraMember", error))
            return
        sample.has_json = True
        try:
            tree = json_object(_read_small(member, ranges), member.name)
            sample.metadata = {name: tree[name] for name in self.wanted if name in tree}
            sample.json_caption = caption_in(tree, member.name)
        except FetchError as error:
            sample.json_problems.append(MemberProblem(member, error.error_type, error.message))


@dataclass(frozen=True)
class Tar:
    """One tar while its rows are made; `prefix` precedes its keys."""

    uri: str
    prefix: str
    entry: Entry

    def reject(self, item_id: str, error_type: str, error: str, uri: str | None = None) -> Row:
        """Make a row that isn't fetched."""
        return Row(item_id, uri or self.uri, None, self.entry.modified, error_type=error_type, error=error)

    def member_reject(self, problem: MemberProblem) -> Row:
        """Make the row of a member that can't be used, identified by its full name."""
        member, error_type, error = problem
        name = readable(member.name)
        return self.reject(
            f"{self.prefix}/{name}", error_type, error, member_uri(self.uri, name, member.offset, member.size)
        )


def list_tars(source: SourceConfig, path: str, selection: Selection) -> Listing:
    """List the items of the tars a path means: one, a folder of them, or a pattern with braces or wildcards.

    `item_id` is the tar's path relative to the source, without `.tar`, then `/` and the key. The caption is `.txt`,
    else the `caption` or `text` of `.json`, which also has the carryover columns. Non-media files next to the tars are
    left out; images there are rejects. A compressed or unreadable tar is a SourceError.
    """
    found, selection = find_selected(path, selection)
    listed = selection.without_junk(found)
    entries = (entry for entry in listed if found.is_named or _may_be_tar(entry.name, selection.left_out))
    rows = chain.from_iterable(_rows_of_entry(entry, found, source.carryover) for entry in entries)
    return list_with_values(rows, source.carryover)


def _may_be_tar(name: str, left_out: LeftOut) -> bool:
    """Return whether a file is a tar, or a medium, which has no place among tars; others are counted and skipped."""
    if name.lower().endswith((".tar", *PACKED_TAR_SUFFIXES)) or (sort := sort_of(name)) == "media":
        return True
    left_out.count("sidecar" if sort == "sidecar" else "other", name)
    return False


def _rows_of_entry(entry: Entry, found: GlobMatches, wanted: tuple[str, ...]) -> Iterator[RowWithValues]:
    """Reject anything but plain tars; every file below the source gives a row or an error."""
    uri = found.uri(entry)
    name, lower = readable(entry.name), entry.name.lower()
    tar = Tar(readable(uri), name[: -len(".tar")] if lower.endswith(".tar") else name, entry)
    if lower.endswith(PACKED_TAR_SUFFIXES):
        raise SourceError(f"{tar.uri}: a compressed tar has no byte ranges; unpack it to a plain .tar")
    if entry.error_type:
        yield tar.reject(name, entry.error_type, entry.error or ""), {}
    elif not is_text(uri):
        yield tar.reject(name, "NameNotUtf8", "the tar's name is not valid UTF-8; rename it"), {}
    elif not lower.endswith(".tar"):
        yield tar.reject(name, "NotATar", "no .tar file; a webdataset source reads only such"), {}
    else:
        yield from _rows_of_tar(tar, wanted)


def _rows_of_tar(tar: Tar, wanted: tuple[str, ...]) -> Iterator[RowWithValues]:
    """Read all headers of one tar, then make its rows; memory is bounded by the members of one tar."""
    samples = Samples(wanted)
    broken = _gather(tar, samples)
    for number, (key, sample) in enumerate(samples.by_key.items()):
        yield _item_row(tar, key, sample, number), sample.metadata
        yield from ((row, {}) for row in _leftover_rows(tar, sample, wanted))
    yield from ((tar.member_reject(problem), {}) for problem in samples.problems)
    if broken:
        kept = f"{plural(len(samples.by_key), 'item')} before it kept"
        yield tar.reject(tar.entry.name, "BrokenTar", f"{broken}; {kept}"), {}


@listing_errors()
def _gather(tar: Tar, samples: Samples) -> str | None:
    """Scan a tar into samples; return where it breaks, if it does.

    An unreadable tar ends the listing, since its items would otherwise look deleted.
    """
    with closing(open_ranges(tar.uri)) as ranges:
        if compression := compression_of(ranges):
            raise SourceError(f"{tar.uri}: a {compression} file has no byte ranges; unpack it to a plain .tar")
        try:
            for member in scan_members(ranges):
                samples.take(member, ranges)
        except BrokenTarError as error:
            return str(error)
    return None


def _item_row(tar: Tar, key: str, sample: TarSample, number: int) -> Row:
    """Make the item of a key; a caption-only item has it in its row, so its uri needs no fetch."""
    item_id, modified = f"{tar.prefix}/{key}", tar.entry.modified
    if media := sample.ranked_media():
        name, offset, size, _ = media[0]
        uri = member_uri(tar.uri, name, offset, size)
        return Row(item_id, uri, size, modified, sample.caption, is_media=sort_of(name) == "media")
    if sample.caption:
        return Row(item_id, row_uri(tar.uri, number), None, modified, sample.caption)
    return tar.reject(item_id, "Empty", "neither an image, a video nor a caption under this key")


def _leftover_rows(tar: Tar, sample: TarSample, wanted: tuple[str, ...]) -> Iterator[Row]:
    media = sample.ranked_media()
    for extra in media[1:]:
        error = f"a second image or video under one key; the item is {media[0].name!r}"
        yield tar.member_reject(MemberProblem(extra, "ExtraMember", error))
    if wanted or not sample.text:
        yield from map(tar.member_reject, sample.json_problems)


def split_key(name: str) -> tuple[str, str]:
    """Split a member's name at the first dot of its base name; drop a leading `./` and lower the extension's case.

    A base name that starts with a dot has no extension: hidden files are their own items.
    """
    folder, base = posixpath.split(posixpath.normpath(name))
    stem, _, extension = base.partition(".")
    if not stem:
        stem, extension = base, ""
    return (f"{folder}/{stem}" if folder else stem), extension.lower()


def _name_problem(member: Member) -> MemberProblem | None:
    if not is_text(member.name):
        return MemberProblem(member, "NameNotUtf8", "the member's name is not valid UTF-8")
    if member.kind is not None:
        return MemberProblem(member, "NotAFile", f"the member is {member.kind}; only regular files are read")
    if member.name.startswith("/") or ".." in member.name.split("/") or not member.name:
        return MemberProblem(member, "UnsafeName", "the member's name is empty, absolute, or climbs with `..`")
    return None


def _media_rank(extension: str) -> int:
    """Return a candidate's rank: plain `jpg` before `mask.png`, known before unknown."""
    if extension in MEDIA_ORDER:
        return MEDIA_ORDER.index(extension)
    suffix = extension.rpartition(".")[2]
    known = MEDIA_ORDER.index(suffix) if suffix in MEDIA_ORDER else len(MEDIA_ORDER)
    return len(MEDIA_ORDER) + known


def _read_small(member: Member, ranges: ByteRanges) -> bytes:
    if member.size > MAX_CAPTION_BYTES:
        raise FetchError("TooLarge", f"{member.name}: {member.size:,} bytes; captions and metadata may have 1 MiB")
    return ranges.read_at(member.offset, member.size)
