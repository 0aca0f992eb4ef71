"""Segments of a run's journal: entries of finished write tasks, joined while the run goes on, one JSON line for each.

A segment is written whole, under a name that no file had; only then are the files of its entries deleted. So a kill at
any moment leaves each entry in one place at least. Of an entry in several, the file of its own counts, else the last
segment: they say the same, unless a write task was begun again, which replaces its entry.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from embedder.store.files import NUM_RECORD_READERS, StoreFiles
from embedder.store.layout import journal_folder

MIN_ENTRIES = 500
"""Files of entries from which they are joined: a listing of a thousand takes milliseconds, and one request."""

_SEGMENT = re.compile(r"sealed-(\d{6,})\.jsonl")
_NAME = re.compile(rb'"name":\s*"([^"]+)"')


class JournalFiles(NamedTuple):
    """Files of a journal.

    Attributes:
        entries: name of each entry that has a file of its own -> its path.
        segments: paths of the segments, the first one first.
    """

    entries: dict[str, str]
    segments: list[str]


def list_journal(files: StoreFiles, run_id: str) -> JournalFiles:
    """List the journal of a run; nothing is read."""
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
    """List a journal in which no segment was made meanwhile: a listing may miss both it and files that it replaces."""
    before, there = list_journal(files, run_id), list_journal(files, run_id)
    while before.segments != there.segments:
        before, there = there, list_journal(files, run_id)
    return before


def seal(files: StoreFiles, run_id: str, names: Iterable[str]) -> None:
    """Join entries that have files of their own to a segment, and delete those files.

    Args:
        files: the store, or the view of a further model, in the process that holds the write lock.
        run_id: of the run.
        names: of the entries.
    """
    there = list_journal(files, run_id)
    paths = [there.entries[name] for name in sorted(names) if name in there.entries]
    if not paths:
        return
    lines = [as_line(content) for content in files.each(files.read, paths, NUM_RECORD_READERS)]
    number = 1 + max((_number(path) for path in there.segments), default=0)
    if files.create(f"{journal_folder(run_id)}/sealed-{number:06d}.jsonl", b"".join(lines)):
        files.delete_each(paths)


def read_lines(files: StoreFiles, run_id: str, but: Collection[str] = ()) -> Iterator[tuple[str, str, bytes]]:
    """Read the entries of a run, each once, in no order; they may be sealed meanwhile.

    Yields:
        Name of an entry, path of the file that holds it, and its JSON.
    """
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
    """Name and JSON of each entry of a segment."""
    for line in content.split(b"\n"):
        if line and (found := _NAME.search(line)) is not None:
            yield found[1].decode(), line


def as_line(content: bytes) -> bytes:
    """JSON document on one line: strings of JSON hold no line breaks, so each is between two tokens."""
    return b"".join(line.strip() for line in content.split(b"\n")) + b"\n"


def find_entry(files: StoreFiles, run_id: str, name: str) -> str | None:
    """Path of the file that holds an entry; None where there is none."""
    path = f"{journal_folder(run_id)}/{name}.json"
    if files.exists(path):
        return path
    there = _list_settled(files, run_id)
    holding = (each for each in there.segments if any(found == name for found, _ in segment_lines(files.read(each))))
    return there.entries.get(name) or next(holding, None)


def names_in_journal(files: StoreFiles, run_id: str) -> set[str]:
    """Names of all entries of a run."""
    there = _list_settled(files, run_id)
    sealed = (name for path in there.segments for name, _ in segment_lines(_read_if_there(files, path) or b""))
    return {*there.entries, *sealed}


def is_segment(path: str) -> bool:
    """Whether a file of the store is a segment of a journal."""
    return "/journal/" in path and _SEGMENT.fullmatch(path.rpartition("/")[2]) is not None


def _number(path: str) -> int:
    return int(path.rpartition("-")[2].removesuffix(".jsonl"))


def _read_if_there(files: StoreFiles, path: str) -> bytes | None:
    try:
        return files.read(path)
    except FileNotFoundError:
        return None
