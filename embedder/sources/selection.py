"""Selects the files of a source that are items, and counts the others."""

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import pyarrow as pa

from embedder.batch_schema import UNREADABLE_KIND
from embedder.config_toml.run_sections import SourceConfig
from embedder.errors import SourceError
from embedder.installation import MISSING_EXTRA
from embedder.sources.captions import ANY_CAPTION, JSON_KEYS, CaptionRules
from embedder.sources.file_names import Sort, in_junk_folder, shown_suffix, sort_of
from embedder.sources.globbing import GlobMatches, expand_braces, find_entries, glob_regex
from embedder.sources.local_listing import Entry
from embedder.sources.uris import name_in
from embedder.storage.object_stores import is_remote
from embedder.storage.printable import printable
from embedder.store.schema import MARKS

MAX_KINDS_SHOWN = 6
MAX_NAMES_SHOWN, MAX_NAME_CHARACTERS = 3, 80
_MAGIC = re.compile(r"[*?\[\]]")

Verdict = Literal["item", "excluded", "own"] | Sort


class FileVerdict(NamedTuple):
    """Verdict on a file: `item`, or the reason why it is no item.

    `is_media` means that it must hold an image, a video or a caption, by its name or because the user named its kind.
    """

    verdict: Verdict
    is_media: bool = False


MEDIA = FileVerdict("item", is_media=True)


@dataclass
class LeftOut:
    """Counts of the files that were left out during listing or after reading their content.

    `counts` has names by verdict: `junk` of systems and programs, a `sidecar` that is no caption, `excluded`, the run's
    `own`. `others` are non-media files by suffix, `unreadable` media by kind, of which the extra `formats` reads
    `missing_extra`. `repeated` rows are counted by the setting that keeps them, `unjoined` items by the path of the
    [[join]]. Orphans are caption files without media; `num_kept_orphans` stay items as the store has it. `orphans` and
    `kept_orphans` are the first names. `described` are no such files, but those that have another one next to them that
    describes them, by place.
    """

    counts: Counter[Verdict] = field(default_factory=Counter)
    others: Counter[str] = field(default_factory=Counter)
    unreadable: Counter[str] = field(default_factory=Counter)
    repeated: Counter[str] = field(default_factory=Counter)
    missing_extra: Counter[str] = field(default_factory=Counter)
    unjoined: Counter[str] = field(default_factory=Counter)
    without_key: Counter[str] = field(default_factory=Counter)
    described: Counter[str] = field(default_factory=Counter)
    num_orphans: int = 0
    num_kept_orphans: int = 0
    orphans: tuple[str, ...] = ()
    kept_orphans: tuple[str, ...] = ()
    num_json_without_caption: int = 0

    def count(self, verdict: Verdict, name: str) -> None:
        """Count one name that is no item."""
        if verdict == "other":
            self.others[shown_suffix(name)] += 1
        else:
            self.counts[verdict] += 1

    def count_orphan(self, name: str, *, is_kept: bool) -> None:
        """Count a caption file without an image or video; the first names are kept."""
        if is_kept:
            self.num_kept_orphans += 1
            self.kept_orphans = (*self.kept_orphans, name)[:MAX_NAMES_SHOWN]
        else:
            self.num_orphans += 1
            self.orphans = (*self.orphans, name)[:MAX_NAMES_SHOWN]

    def with_read(self, rows: pa.Table) -> "LeftOut":
        """Add the items left out after reading to a copy; `rows` has `uri`, `error_type` and `error`."""
        left_out = deepcopy(self)
        for row in rows.select(["uri", "error_type", "error"]).to_pylist():
            if row["error_type"] in (UNREADABLE_KIND, MISSING_EXTRA):
                kind = row["error"].partition(":")[0]
                left_out.unreadable[kind] += 1
                left_out.missing_extra[kind] += row["error_type"] == MISSING_EXTRA
            else:
                left_out.others[shown_suffix(name_in(row["uri"]))] += 1
        return left_out

    def without_kept(self) -> "LeftOut":
        """Return these counts without the captions that stay as items."""
        return replace(self, num_kept_orphans=0, kept_orphans=())

    def lines(self) -> list[str]:
        """Return lines for the user; junk, sidecars and files excluded on purpose aren't mentioned."""
        lines = []
        if self.others:
            lines.append(f"{_files(self.others, 'other')} left out: {count_kinds(self.others)}")
        if missing := +self.missing_extra:
            lines.append(
                f"{_files(missing)} left out for want of a decoder: {count_kinds(missing)}; "
                "pip install 'embedder[formats]': the next run embeds them"
            )
        if unreadable := self.unreadable - self.missing_extra:
            lines.append(
                f"{_files(unreadable)} of kinds that this version can't read left out: "
                f"{count_kinds(unreadable)}; convert them (images to JPEG, videos to MP4): the next run embeds them"
            )
        lines += self._caption_lines()
        for way_out, number in self.repeated.items():
            rows = "row holds" if number == 1 else "rows hold"
            lines.append(
                f"{number:,} {rows} what an earlier one does, left out with captions that may differ; "
                f"{way_out} keeps every row"
            )
        for path, number in self.unjoined.items():
            lines.append(
                f"{number:,} {'item has' if number == 1 else 'items have'} no row in the [[join]] {path}: what it "
                'brings is null there; missing = "error" refuses that'
            )
        for path, number in self.without_key.items():
            lines.append(
                f"{number:,} {'row' if number == 1 else 'rows'} of the [[join]] {path} left out: without a key"
            )
        return lines

    def _caption_lines(self) -> list[str]:
        lines = []
        if self.described:
            lines.append(f"described by files next to them (`[captions] from`): {count_kinds(self.described)}")
        if number := self.num_orphans:
            lines.append(
                f"{_orphans(number, 'left out')}: {_format_kind(self.orphans, number)}; "
                "set `[captions] alone = true` to embed such texts"
            )
        if number := self.num_kept_orphans:
            lines.append(
                f"{_orphans(number, 'kept, as the store has it' if number == 1 else 'kept, as the store has them')}: "
                f"{_format_kind(self.kept_orphans, number)}; set `[captions] alone = true` to keep such texts "
                "without this line, or false to take them out"
            )
        if number := self.num_json_without_caption:
            lines.append(
                f"{number:,} .json without a caption: read are its keys {', '.join(JSON_KEYS)}; "
                "`[captions] columns` makes columns of others"
            )
        return lines


def _orphans(number: int, what: str) -> str:
    files, verb = ("file", "belongs") if number == 1 else ("files", "belong")
    return f"{number:,} .txt or .json {files} that {verb} to no image or video {what}"


def _format_kind(names: Sequence[str], number: int) -> str:
    more = [f"{number - len(names):,} more"] if number > len(names) else []
    return ", ".join([*(printable(name, MAX_NAME_CHARACTERS) for name in names), *more])


def _files(counts: Counter[str], word: str = "") -> str:
    total = counts.total()
    return " ".join(filter(None, (f"{total:,}", word, "file" if total == 1 else "files")))


def count_kinds(counts: Counter[str]) -> str:
    """Format counts as `9 .pdf, 3 .md`: the most frequent first, a long tail as one number."""
    ranked = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
    shown = [f"{number:,} {name}" for name, number in ranked[:MAX_KINDS_SHOWN]]
    rest = sum(number for _, number in ranked[MAX_KINDS_SHOWN:])
    return ", ".join([*shown, *([f"{rest:,} more"] if rest else [])])


@dataclass(frozen=True)
class NamePatterns:
    """Compiled patterns that select files by name, with the rules of a `.gitignore`.

    A pattern without a slash means a file or folder of that name at any depth; with one, a path from the source's root.
    `*` and `?` stop at a slash, `**` crosses it, `{a,b}` and `[a-z]` choose; case is ignored. Everything below a
    matching folder matches. `endings` are the literal ends of patterns that name a kind of file or one file, as `.pdf`
    of `*.pdf`.
    """

    matcher: re.Pattern[str]
    endings: tuple[str, ...]

    def match(self, path: str) -> bool:
        """Return whether a path relative to the root matches."""
        return self.matcher.match(path) is not None

    def name_kind(self, path: str) -> bool:
        """Return whether a matching path does so by its kind or full name, not merely as part of a folder."""
        return path.lower().endswith(self.endings) if self.endings else False


def compile_patterns(patterns: Sequence[str], where: str) -> NamePatterns | None:
    """Compile patterns; None if there are none, a SourceError if one is empty or invalid."""
    plain = [each for pattern in patterns for each in expand_braces(pattern)]
    if not plain:
        return None
    for each in plain:
        if not each.strip("/"):
            raise SourceError(f'{where}: {each!r} names no file; write a pattern such as "*.tmp" or "private/**"')
        if each.startswith("!"):
            raise SourceError(
                f"{where}: {each!r}: unlike in a .gitignore, no pattern takes back what others say; list only what "
                f"you mean, or write {'?' + each[1:]!r} for names that begin with !"
            )
    try:
        matcher = re.compile("|".join(_as_regex(each) for each in plain), re.IGNORECASE | re.DOTALL)
    except re.error as error:
        raise SourceError(f"{where}: {' '.join(patterns)} can't be read ({error}); correct its brackets") from None
    return NamePatterns(matcher, tuple(filter(None, map(_ending, plain))))


def _as_regex(pattern: str) -> str:
    inner = pattern.strip("/")
    is_path = "/" in pattern.rstrip("/")
    if inner.endswith("/**"):
        inner = inner[: -len("/**")]
        below = "/.*"
    else:
        below = "/.*" if pattern.endswith("/") else "(?:/.*)?"
    inner = ".*" if inner == "**" else glob_regex(inner).pattern.removesuffix(r"\Z")
    return ("" if is_path else "(?:.*/)?") + inner + below + r"\Z"


def _ending(pattern: str) -> str:
    if pattern.endswith("/"):
        return ""
    last = pattern.rpartition("/")[2].lower()
    tail = _MAGIC.split(last)[-1]
    return tail if tail == last or "." in tail else ""


class Selection:
    """Judges the names of one source, and counts what it leaves out."""

    def __init__(
        self,
        source: SourceConfig,
        root: str,
        own: Collection[str],
        left_out: LeftOut,
        captions: CaptionRules = ANY_CAPTION,
    ) -> None:
        """Compile the patterns `include` and `exclude` of a source.

        `root` is the folder or URI that names are relative to. `own` has absolute paths and URIs of files and whole
        folders that the run itself writes. `left_out` counts the files that are no items. `captions` decides which
        caption files without an image or video are items. Raises a SourceError if a pattern is invalid.
        """
        self.left_out, self.captions = left_out, captions
        self._source, self._places = source, own
        self._root = root.rstrip("/")
        self._include = compile_patterns(source.include, f"{source.path}: include")
        self._exclude = compile_patterns(source.exclude, f"{source.path}: exclude")
        self._own = tuple(_relative_to(self._root, own))

    def below(self, root: str) -> "Selection":
        """Return the same selection for names relative to another folder or URI."""
        return Selection(self._source, root, self._places, self.left_out, self.captions)

    def skips(self, folder: str) -> bool:
        """Return whether a folder is left out as a whole; it is then counted as one name."""
        verdict = self._folder_verdict(folder)
        if verdict is not None:
            self.left_out.count(verdict, folder)
        return verdict is not None

    def _folder_verdict(self, folder: str) -> Verdict | None:
        if self._is_own(folder) or (not is_remote(self._root) and is_store(f"{self._root}/{folder}")):
            return "own"
        if self.excludes(folder) or self.excludes(f"{folder}/"):  # `private/` means what is below it
            return "excluded"
        return "junk" if in_junk_folder(folder) else None

    def judge(self, name: str) -> FileVerdict:
        """Judge a file. Junk is never an item; other non-media files are items if `include` names their kind."""
        if self._own and self._is_own(name):
            return FileVerdict("own")
        if self.excludes(name):
            return FileVerdict("excluded")
        sort, is_named = sort_of(name), False
        if self._include is not None and sort != "junk":
            if not self._include.match(name):
                return FileVerdict("excluded")
            is_named = self._include.name_kind(name)
        if sort == "media" or is_named:
            return MEDIA
        return FileVerdict("item", name[-4:].lower() == ".txt") if sort == "unknown" else FileVerdict(sort)

    def without_junk(self, found: GlobMatches) -> Iterator[Entry]:
        """Yield the found files without junk and the run's own files; a file named explicitly stays."""
        for entry in found.entries:
            verdict = self.judge(entry.name).verdict
            if verdict in ("own", "junk") and not found.is_named:
                self.left_out.count(verdict, entry.name)
            else:
                yield entry

    def may_caption(self, name: str) -> bool:
        """Return whether a caption file may be used for its item; `include` names items, not their captions."""
        return not self.excludes(name) and not self._is_own(name) and sort_of(name) not in ("junk", "sidecar")

    def excludes(self, name: str) -> bool:
        """Return whether `exclude` names a file."""
        return self._exclude is not None and self._exclude.match(name)

    def takes_orphan(self, name: str) -> bool:
        """Return whether a caption file without an image or video is an item; it is counted if nobody asked for it."""
        is_asked = self._include is not None and self._include.match(name) and self._include.name_kind(name)
        if self.captions.alone or is_asked:
            return True
        item_id = f"{self._source.name}:{name}" if self._source.name else name
        is_kept = None if self.captions.is_kept is None else self.captions.is_kept(item_id)
        if is_kept is not False:
            self.left_out.count_orphan(name, is_kept=is_kept is True)
        return is_kept is not None

    def _is_own(self, name: str) -> bool:
        return any(name == each or name.startswith(f"{each}/") for each in self._own)


def take_all(root: str) -> Selection:
    """Return a selection that leaves out only files whose names show that they are no items."""
    return Selection(SourceConfig(path=root), root, (), LeftOut())


def find_selected(path: str, selection: Selection) -> tuple[GlobMatches, Selection]:
    """Find what a path means, and the selection relative to its root; a SourceError if nothing is found."""
    found = find_entries(path, selection.skips)
    return found, selection.below(found.root)


def _relative_to(root: str, places: Iterable[str]) -> Iterable[str]:
    """Yield the places below the root, relative to it, even if the root is reached through a link."""
    roots = {root} if is_remote(root) else {root, os.path.realpath(root)}
    for place in places:
        also = {place} if is_remote(place) else {place, os.path.realpath(place)}
        found = {each[len(top) + 1 :] for each in also for top in roots if each.startswith(f"{top}/")}
        yield from sorted(found)


def is_store(folder: str) -> bool:
    """Whether a local folder is a store of embeddings."""
    record, runs = MARKS
    return os.path.isfile(f"{folder}/{record}") and os.path.isdir(f"{folder}/{runs}")  # noqa: PTH112, PTH113
