"""Segments of a run's journal: entries of finished write tasks, joined while the run continues, one JSON line each.

A segment is written whole under a new name; only then are the files of its entries deleted. So a kill at any moment
leaves each entry in at least one place. If an entry is in several, its own file counts, else the last segment. They are
equal unless a write task was restarted, which replaces its entry.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from embedder.store.files import NUM_RECORD_READERS, StoreFiles
from embedder.store.layout import journal_folder

MIN_ENTRIES = 500
"""Number of entry files from which they are joined: a listing of a thousand takes milliseconds and one request."""

_SEGMENT = re.compile(r"sealed-(\d{6,})\.jsonl")
_NAME = re.compile(rb'"name":\s*"([^"]+)"')


class JournalFiles(NamedTuple):
    """Files of a journal: the path of each entry with its own file, by name, and the paths of the segments in order."""

    entries: dict[str, str]
    segments: list[str]


def list_journal(files: StoreFiles, run_id: str) -> JournalFiles:
    """List the journal of a run without reading it."""
    entries: dict[str, str] = {}
    segments: dict[int, str] = {}
    for info in files.list(journal_folder(run_id)):
        name = info.path.rpartition("/")[2]
        if found := _SEGMENT.fullmatch(name):
            segments[int(found[1])] = info.path
        elif name.endswith(".json"):
            entries[name.removesuffix(".json")] = info.path
    return JournalFiles(dict(sorted(entries.items())), [segments[number] for number in sorted(segments)])


def _list_settled(files: StoreFiles, run_id: str) -> JournalFiles:
    """List a journal, again if a segment was made meanwhile: a listing may miss both it and the files it replaces."""
    before, there = list_journal(files, run_id), list_journal(files, run_id)
    while before.segments != there.segments:
        before, there = there, list_journal(files, run_id)
    return before


def seal(files: StoreFiles, run_id: str, names: Iterable[str]) -> None:
    """Join entries with their own files into a segment, and delete those files; needs the write lock."""
    there = list_journal(files, run_id)
    paths = [there.entries[name] for name in sorted(names) if name in there.entries]
    if not paths:
        return
    lines = [as_line(content) for content in files.each(files.read, paths, NUM_RECORD_READERS)]
    number = 1 + max((_number(path) for path in there.segments), default=0)
    if files.create(f"{journal_folder(run_id)}/sealed-{number:06d}.jsonl", b"".join(lines)):
        files.delete_each(paths)


def read_lines(files: StoreFiles, run_id: str, but: Collection[str] = ()) -> Iterator[tuple[str, str, bytes]]:
    """Yield name, path and JSON of a run's entries except `but`, once each, unordered, even if sealed meanwhile."""
    seen, is_whole = set(but), False
    while not is_whole:
        is_whole, there = True, _list_settled(files, run_id)
        new = [(name, path) for name, path in there.entries.items() if name not in seen]
        contents = files.stream(lambda path: _read_if_there(files, path), [path for _, path in new])
        for (name, path), content in zip(new, contents, strict=True):
            if content is None:  # it has moved into a segment
                is_whole = False
            else:
                seen.add(name)
                yield name, path, content
        for path in reversed(there.segments):
            for name, line in segment_lines(_read_if_there(files, path) or b""):
                if name not in seen:
                    seen.add(name)
                    yield name, path, line


def segment_lines(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield name and JSON of each entry of a segment."""
    for line in content.split(b"\n"):
        if line and (found := _NAME.search(line)) is not None:
            yield found[1].decode(), line


def as_line(content: bytes) -> bytes:
    """Put a JSON document on one line: JSON strings hold no line breaks, so each break is between two tokens."""
    return b"".join(line.strip() for line in content.split(b"\n")) + b"\n"


def find_entry(files: StoreFiles, run_id: str, name: str) -> str | None:
    """Return the path of the file that holds an entry; None if there is none."""
    path = f"{journal_folder(run_id)}/{name}.json"
    if files.exists(path):
        return path
    there = _list_settled(files, run_id)
    holding = (each for each in there.segments if any(found == name for found, _ in segment_lines(files.read(each))))
    return there.entries.get(name) or next(holding, None)


def names_in_journal(files: StoreFiles, run_id: str) -> set[str]:
    """Return the names of all entries of a run."""
    there = _list_settled(files, run_id)
    sealed = (name for path in there.segments for name, _ in segment_lines(_read_if_there(files, path) or b""))
    return {*there.entries, *sealed}


def is_segment(path: str) -> bool:
    """Return whether a file of the store is a journal segment."""
    return "/journal/" in path and _SEGMENT.fullmatch(path.rpartition("/")[2]) is not None


def _number(path: str) -> int:
    return int(path.rpartition("-")[2].removesuffix(".jsonl"))


def _read_if_there(files: StoreFiles, path: str) -> bytes | None:
    try:
        return files.read(path)
    except FileNotFoundError:
        return None
