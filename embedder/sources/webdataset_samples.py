"""The members of a tar, gathered by key.

Source: "The WebDataset Format" (github.com/webdataset/webdataset, README and `tariterators.py`): a key is the member's
path up to the first dot of its base name. Unlike there, the members of a key need not follow each other, and nothing is
skipped in silence.
"""

import posixpath
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from embedder.sources.captions import MAX_CAPTION_BYTES, caption_in, decode_text, json_object
from embedder.sources.errors import FetchError
from embedder.sources.file_names import sort_of
from embedder.sources.tar_scan import Member
from embedder.storage.file_adapter import ByteRanges
from embedder.storage.printable import is_text

# The member that is the item, where a key has several; what is not in the list comes after, and content decides.
MEDIA_ORDER = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "avif", "mp4", "mov", "mkv", "webm", "avi")
# What stands beside an item and is never one: WebDataset's own names for labels, texts, arrays and pickles.
COMPANIONS = frozenset(
    (
        "txt",
        "text",
        "transcript",
        "json",
        "jsonl",
        "cls",
        "cls2",
        "index",
        "inx",
        "id",
        "csv",
        "tsv",
        "yaml",
        "yml",
        "xml",
        "html",
        "md",
        "npy",
        "npz",
        "pyd",
        "pickle",
        "pkl",
        "pth",
        "pt",
        "ten",
        "tb",
        "mp",
        "msg",
    )
)


class MemberProblem(NamedTuple):
    """A member that can't be used, and the reason."""

    member: Member
    error_type: str
    error: str


@dataclass
class TarSample:
    """Members of one key, gathered while the headers are read.

    Attributes:
        media: candidates for the item, by rank.
        text: the `.txt` caption; json_caption: the one in `.json`.
        metadata: the wanted values of `.json`.
        json_problem: kept apart, since it matters only where something is wanted of the `.json`.
    """

    media: list[tuple[int, Member]] = field(default_factory=list)
    text: str | None = None
    json_caption: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    json_problem: MemberProblem | None = None

    @property
    def caption(self) -> str | None:
        """Return the caption: `.txt` before `.json`."""
        return self.text or self.json_caption or None

    def ranked_media(self) -> list[Member]:
        """Order the candidates; members of one rank keep the tar's order."""
        return [member for _, member in sorted(self.media, key=lambda ranked: ranked[0])]


@dataclass
class Samples:
    """All keys of one tar; `wanted` names the values to keep of each `.json`."""

    wanted: tuple[str, ...] = ()
    by_key: dict[str, TarSample] = field(default_factory=dict)
    problems: list[MemberProblem] = field(default_factory=list)

    def take(self, member: Member, ranges: ByteRanges) -> None:
        """Put one member to its key; captions and metadata are read at once, while their block is in memory."""
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
        try:
            tree = json_object(_read_small(member, ranges), member.name)
            sample.metadata = {name: tree[name] for name in self.wanted if name in tree}
            sample.json_caption = caption_in(tree, member.name)
        except FetchError as error:
            sample.json_problem = MemberProblem(member, error.error_type, error.message)


def split_key(name: str) -> tuple[str, str]:
    """Split a member's name at the first dot of its base name; a leading `./` is dropped, extensions become lower case.

    A base name that starts with a dot has no extension: hidden files are items of their own.
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
    """Order candidates: plain `jpg` before `mask.png`, known before unknown."""
    if extension in MEDIA_ORDER:
        return MEDIA_ORDER.index(extension)
    suffix = extension.rpartition(".")[2]
    known = MEDIA_ORDER.index(suffix) if suffix in MEDIA_ORDER else len(MEDIA_ORDER)
    return len(MEDIA_ORDER) + known


def _read_small(member: Member, ranges: ByteRanges) -> bytes:
    if member.size > MAX_CAPTION_BYTES:
        raise FetchError("TooLarge", f"{member.name}: {member.size:,} bytes; captions and metadata may have 1 MiB")
    return ranges.read_at(member.offset, member.size)
