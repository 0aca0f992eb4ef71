"""Invariants of a store, checked at every change of it, and a model of its publications over sets of items.

The same checker reads what a simulation does and what a real run has recorded (`scripts/check_store_trace.py`).
"""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from embedder.store.backends import is_unfinished
from embedder.store.tables.deletion_vectors import DeletionVector, decode_rows, decode_z85, vector_of

TABLES = ("embeddings", "items")
SAME_ROWS = ("compaction", "migration", "index", "vacuum")
_LIGHT_PART = re.compile(r"(models/[^/]+/)?(items|embeddings)/part-[^/]+\.parquet")


class Version(NamedTuple):
    """Rows of a publication: item -> version, of each table."""

    items: dict[str, str]
    embeddings: dict[str, str]


class Effect(NamedTuple):
    """Entry of a log as the model reads it."""

    added: dict[str, DeletionVector | None]
    removed: frozenset[str]


@lru_cache(maxsize=20_000)
def _parse_entry(content: bytes) -> Effect:
    actions = [json.loads(line) for line in content.decode().splitlines() if line.strip()]
    added = {each["add"]["path"]: vector_of(each["add"]) for each in actions if "add" in each}
    return Effect(added, frozenset(each["remove"]["path"] for each in actions if "remove" in each))


def _models(current: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Folder of each model, with the versions that are published of it."""
    for model, own in {"": current, **current.get("models", {})}.items():
        yield f"models/{model}/" if model else "", own


def _vector_files(table: str, held: Mapping[str, DeletionVector | None]) -> set[str]:
    files = {vector.file(table) for vector in held.values() if vector is not None}
    return {f"{table}/{path}" for path in files if path is not None}


@lru_cache(maxsize=20_000)
def _parse_json(content: bytes) -> Any:
    return json.loads(content)


@dataclass
class Checker:
    """What must hold of a store after each change."""

    has_rows: bool = True  # whether part files are those of `light_rows`, so that rows can be compared
    violations: list[str] = field(default_factory=list)  # what did not hold
    purged: set[str] = field(default_factory=set)  # items that were purged, by a command that said so
    retired: set[str] = field(default_factory=set)  # items that commands were told to remove
    purge_begun: set[str] = field(default_factory=set)
    unfinished_purges: set[str] = field(default_factory=set)
    written: set[tuple[str, str]] = field(default_factory=set)
    states: dict[str, Version] = field(default_factory=dict)
    current: dict[str, Any] | None = None
    needed: frozenset[str] = frozenset()
    last_writer: dict[str, Any] = field(default_factory=dict)
    num_changes: int = 0
    content: Callable[[str], bytes | None] = lambda path: None

    def fail(self, text: str) -> None:
        if text not in self.violations:
            self.violations.append(text)

    def on_put(self, path: str, content: bytes, writer: Any = None) -> None:
        self.num_changes += 1
        self.last_writer[path] = (writer, self.num_changes)
        if path == "CURRENT.json":
            self._on_current(content, writer)
        elif path in self.needed:
            if "index/" in path:
                self.fail(f"the index that is published was written again: {path}")
            self._check_rows("a file of what is published was rewritten")
        elif self.has_rows and _LIGHT_PART.fullmatch(path) is not None:
            self.written.update((row["item_id"], row["version"]) for row in _parse_json(content))

    def on_delete(self, path: str) -> None:
        self.num_changes += 1
        if path in self.needed:
            self.fail(f"deleted what is published: {path}")

    def _on_current(self, content: bytes, writer: Any) -> None:
        before, previous = self.current, self.states.get((self.current or {}).get("run_id", ""))
        self.current = _parse_json(content)
        version = self._check_rows("")
        if version is None:
            return
        run_id = self.current["run_id"]
        if before is not None and run_id < before["run_id"]:
            self.fail(f"CURRENT went back from {before['run_id']} to {run_id}")
        for name in self.current.get("deleting", ()) if before is not None else ():
            for path in set(_parse_json(self.content(f"deletions/{name}.json") or b"[]")) & self.needed:
                self.fail(f"marked what is published to be deleted: {path}")
        is_new = before is None or before["run_id"] != run_id
        if self.has_rows:
            self._check_move(previous, version, run_id, is_new=is_new)
        else:
            self._check_record(run_id, is_new=is_new)
        self.states[run_id] = version
        if writer is not None:
            writer.notes["published"] = version

    def _check_rows(self, cause: str) -> Version | None:
        current, needed, rows = self.current or {}, {"CURRENT.json"}, {}
        needed.add(f"runs/{current.get('run_id')}/published.json")
        for folder, own in _models(current):
            for name in TABLES:
                paths = self._paths(folder + name, own[name], needed)
                if paths is None:
                    self.fail(f"CURRENT can't be read: the log of {folder}{name} lacks entries to {own[name]}; {cause}")
                    return None
                files = {f"{folder}{name}/{path}": vector for path, vector in paths.items()}
                needed.update(files, own_files := _vector_files(folder + name, paths))
                if lacking := [path for path in (*files, *own_files) if not self.content(path)]:
                    self.fail(f"CURRENT can't be read: {lacking[0]} is gone or empty; {cause}")
                    return None
                if self.has_rows and not folder:
                    rows[name] = self._rows(name, files)
            if own.get("index") is not None:
                path = f"{folder}index/{own['index']:06d}"
                if self.content(f"{path}/manifest.json") is None:
                    self.fail(f"CURRENT names an index that is not there: {path}")
                needed.update((f"{path}/manifest.json", f"{path}/vectors.faiss"))
        self.needed = frozenset(needed)
        if not self.has_rows:
            return Version({}, {})
        version = Version(rows["items"], rows["embeddings"])
        for item in version.items.keys() ^ version.embeddings.keys():
            self.fail(f"item {item} has {'no vector' if item in version.items else 'a vector and no record'}; {cause}")
        for item in version.items.keys() & version.embeddings.keys():
            if version.items[item] != version.embeddings[item]:
                self.fail(f"item {item}: vector and record of different contents; {cause}")
        return version

    def reread(self) -> None:
        content = self.content("CURRENT.json")
        if self.current is not None and not content:
            self.fail("CURRENT.json is gone or empty")
        elif content:
            self.current = _parse_json(content)
            self._check_rows("after a power cut")

    def newest_paths(self, table: str, paths: Collection[str]) -> set[str]:
        entries = [path for path in paths if path.startswith(f"{table}/_delta_log/") and path.endswith(".json")]
        held = self._paths(table, len(entries) - 1, set()) or {}
        return {*held, *(path.removeprefix(f"{table}/") for path in _vector_files(table, held))}

    def _rows(self, name: str, files: Mapping[str, DeletionVector | None]) -> dict[str, str]:
        found: dict[str, str] = {}
        for path, vector in files.items():
            marked = self._marked(name, vector)
            for number, row in enumerate(_parse_json(self.content(path) or b"[]")):
                if number in marked:
                    continue
                if row["item_id"] in found:
                    self.fail(f"{name} holds item {row['item_id']} twice")
                found[row["item_id"]] = row["version"]
        return found

    def _marked(self, table: str, vector: DeletionVector | None) -> set[int]:
        if vector is None:
            return set()
        path = vector.file(table)
        data = decode_z85(vector.value) if path is None else (self.content(f"{table}/{path}") or b"")
        start = 0 if path is None else (vector.offset or 0) + 4
        return set(decode_rows(data[start : start + vector.size_bytes], vector.cardinality).tolist())

    def _paths(self, table: str, version: int, needed: set[str]) -> dict[str, DeletionVector | None] | None:
        held: dict[str, DeletionVector | None] = {}
        for number in range(version + 1):
            path = f"{table}/_delta_log/{number:020d}.json"
            content = self.content(path)
            if not content:
                return None
            needed.add(path)
            entry = _parse_entry(content)
            held = {path: vector for path, vector in held.items() if path not in entry.removed} | entry.added
        return held

    def _check_record(self, run_id: str, *, is_new: bool, num_items: int | None = None) -> str:
        record = self.content(f"runs/{run_id}/published.json")
        if not record:
            self.fail(f"{run_id} is published and has no record")
            return ""
        found, current = _parse_json(record), self.current or {}
        pairs = [(found, current), *((found["models"][name], own) for name, own in current.get("models", {}).items())]
        is_same = all(mine[name] == theirs[name] for mine, theirs in pairs for name in TABLES)
        if is_new and not (is_same and num_items in (None, found["num_items"])):
            self.fail(f"the record of {run_id} is of other versions, or counts other rows")
        return found["kind"]

    def _check_move(self, before: Version | None, after: Version, run_id: str, *, is_new: bool) -> None:
        """Compare a change of CURRENT.json with what the model allows for its kind."""
        old, new = before.items if before is not None else {}, after.items
        kind = self._check_record(run_id, is_new=is_new, num_items=len(new))
        if back := self.purged & new.keys():
            self.fail(f"purged and published again: {sorted(back)}")
        if not is_new or kind in SAME_ROWS:
            if old != new and before is not None:
                self.fail(f"{kind or 'a change'} of {run_id} changed rows: {_differing(old, new)}")
        elif kind == "rollback":
            restored = (self.current or {}).get("restores")
            target = self.states[restored].items if restored in self.states else None
            if target is None or not new.items() <= target.items() or target.keys() - new.keys() - self.being_purged:
                self.fail(f"rollback {run_id} did not bring back {restored}")
        elif kind == "purge":
            if not new.items() <= old.items() or old.keys() - new.keys() - self.being_purged:
                self.fail(f"purge {run_id} changed other rows: {_differing(old, new)}")
        else:
            if lost := old.keys() - new.keys() - self.retired:
                self.fail(f"{kind} {run_id} lost {sorted(lost)}")
            if foreign := {each for each in new.items() if old.get(each[0]) != each[1]} - self.written:
                self.fail(f"{kind} {run_id} published rows that nobody wrote: {sorted(foreign)}")

    @property
    def published(self) -> Version | None:
        return self.states.get((self.current or {}).get("run_id", ""))

    @property
    def being_purged(self) -> set[str]:
        return self.purge_begun | self.purged


def _differing(old: dict[str, str], new: dict[str, str]) -> list[str]:
    return sorted(each for each in old.keys() | new.keys() if old.get(each) != new.get(each))


MODEL = r"(?P<folder>models/[^/]+/)?"
_IN_PART = re.compile(MODEL + r"((items|embeddings)/_delta_log|runs/[^/]+/journal)/.+")
"""Files of which some of the content is recorded."""


@dataclass
class Change:
    """One change of the store, as it was recorded."""

    writer: tuple[str, int]  # host and number of its process
    begin_ns: int  # time before it
    end_ns: int | None  # time after it; None where it has no end
    what: str  # put or delete
    paths: tuple[str, ...]  # one, or those that are deleted
    condition: Any = None  # of a put: None, "absent", or the tag of a version
    content: bytes | None = None  # of a put, where it was recorded
    size: int = 0
    outcome: str = "unknown"  # done, refused, or unknown
    tag: dict[str, Any] | None = None  # of the version that was written
    lacking: list[str] = field(default_factory=list)  # what should have been there before it
    is_made: bool = False

    @property
    def path(self) -> str:
        return self.paths[0]

    def is_of(self, tag: Any) -> bool:
        """Whether a tag can be that of what this put writes: servers give the MD5 of a small file."""
        if self.tag is not None:
            return self.tag == tag
        if self.content is None or not isinstance(tag, dict) or _IN_PART.fullmatch(self.path):
            return True
        digests = hashlib.sha256(self.content).hexdigest(), hashlib.md5(self.content).hexdigest()
        known = [str(value).strip('"') for name, value in tag.items() if name in ("sha256", "e_tag")]
        return any(value in digests for value in known) or any(len(value) not in (32, 64) for value in known)


def needed_first(content: bytes | None) -> list[str]:
    """Files that must be there before CURRENT.json names them, besides the older entries of logs."""
    if content is None:
        return []
    current = json.loads(content)
    paths = [f"runs/{current['run_id']}/published.json"]
    for folder, own in _models(current):
        paths += [f"{folder}{name}/_delta_log/{own[name]:020d}.json" for name in TABLES if own[name] >= 0]
        paths += [f"{folder}index/{own['index']:06d}/manifest.json"] if own.get("index") is not None else []
    return paths


_PART = re.compile(MODEL + r"(items|embeddings)/part-(?P<run>[^/]+)\.parquet")
_ENTRY = re.compile(MODEL + r"(items|embeddings)/_delta_log/\d{20}\.json")
_JOURNAL = re.compile(MODEL + r"runs/(?P<run>[^/]+)/journal/(?P<name>[^/]+)\.json")
_SEGMENT = re.compile(MODEL + r"runs/(?P<run>[^/]+)/journal/sealed-\d+\.jsonl")
_MOVES = re.compile(MODEL + r"runs/[^/]+/journal/(?P<name>[^/]+)\.parquet")
_IN_RUN = re.compile(MODEL + r"runs/(?P<run>[^/]+)/(?P<rest>.+)")
_INDEX = re.compile(MODEL + r"index/(?P<number>\d{6,})/(?P<name>[^/]+)")
_LIST = re.compile(r"deletions/(?P<token>[^/]+)\.json")
_CONDITIONAL = re.compile(
    MODEL + r"(CURRENT\.json|\.lock|store\.json|purged\.json|deletions/[^/]+\.json"
    r"|runs/[^/]+/(run|published|publication|interim)\.json|runs/[^/]+/journal/sealed-\d+\.jsonl"
    r"|(items|embeddings)/_delta_log/\d{20}\.(json|checkpoint\.parquet))"
)
_MADE_AGAIN = re.compile(MODEL + r"(words|query_towers)/.+")
_MADE_IN_PLACE = re.compile(MODEL + r"(index|words|query_towers)/.+")
_NOT_RECORDED = re.compile(_MADE_IN_PLACE.pattern + r"|\.lock|runs\.jsonl")
"""On a disk: what is made in place, the lock of the operating system, and a log for people that is appended to."""
_THERE = b"."


@dataclass
class TraceChecker:
    """What must hold of a store's trace."""

    is_whole: bool  # whether the trace begins with the store
    is_on_disk: bool  # whether indexes are made in place, which is not recorded
    # earlier: content of a file that was there before the trace began, or is not recorded; None where there is none
    earlier: Callable[[str], bytes | None] | None = None
    will_go: frozenset[str] = frozenset()  # files that are deleted before the trace ends
    checker: Checker = field(default_factory=lambda: Checker(has_rows=False))  # of the invariants
    files: dict[str, Change] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    ever: set[str] = field(default_factory=set)
    writers: dict[str, set[tuple[str, int]]] = field(default_factory=dict)
    doomed: set[str] = field(default_factory=set)
    lists: dict[str, frozenset[str]] = field(default_factory=dict)
    known_lists: set[str] = field(default_factory=set)
    journalled: set[str] = field(default_factory=set)
    sealed: dict[str, set[str]] = field(default_factory=dict)
    withdrawn: set[str] = field(default_factory=set)
    sessions: dict[str, int] = field(default_factory=dict)
    open: dict[str, list[Change]] = field(default_factory=dict)
    refused: dict[str, list[Change]] = field(default_factory=dict)
    num_effects: int = 0

    def __post_init__(self) -> None:
        self.checker.content = self.content

    @property
    def deviations(self) -> list[str]:
        return self.checker.violations

    def fail(self, change: Change, text: str) -> None:
        host, pid = change.writer
        self.checker.fail(f"{text} (process {pid} on {host}, at {change.begin_ns / 1e9:.3f} s)")

    def content(self, path: str) -> bytes | None:
        """Content of a file, or a placeholder; None where it is not there."""
        if (found := self.files.get(path)) is not None:
            if found.content is None and path.endswith(".json"):  # an entry of a log, too
                return (self.earlier(path) if self.earlier is not None else None) or b"{}"
            return found.content if found.content is not None else (_THERE if found.size else b"")
        if path in self.gone:
            return None
        for each in self._puts(path):
            return each.content if each.content is not None else _THERE
        is_unrecorded = self.is_on_disk and _MADE_IN_PLACE.fullmatch(path) is not None
        if self.is_whole and not is_unrecorded:
            return None
        return _THERE if self.earlier is None or path in self.will_go else self.earlier(path)

    def _puts(self, path: str) -> list[Change]:
        """Writes of a file that are under way."""
        return [each for each in self.open.get(path, ()) if each.what == "put"]

    def begin(self, change: Change) -> None:
        """Note a change that is under way, and what it needs before it."""
        for path in change.paths:
            self.open.setdefault(path, []).append(change)
        if change.what != "put":
            return
        self.ever.add(change.path)
        self.writers.setdefault(change.path, set()).add(change.writer)
        if change.path == "CURRENT.json":
            change.lacking = [path for path in needed_first(change.content) if self.content(path) is None]
        elif (entry := _JOURNAL.fullmatch(change.path)) is not None and change.content:
            parts = [f"{entry['folder'] or ''}{part}" for part in json.loads(change.content)["parts"]]
            change.lacking = [part for part in parts if self.is_whole and part not in self.ever]
            self.journalled.update(parts)
        elif _LIST.fullmatch(change.path) and change.content is not None:
            self.lists[change.path] = frozenset(json.loads(change.content))
        elif _ENTRY.fullmatch(change.path) and change.content is not None:
            table = change.path.partition("/_delta_log/")[0]
            added = [f"{table}/{each}" for each in _parse_entry(change.content).added]
            change.lacking = [path for path in added if self.is_whole and path not in self.ever]
            self.journalled.update(added)

    def end(self, change: Change) -> None:
        if change.outcome == "unknown":
            return  # it may have been made, or may be made later
        for path in change.paths:
            if change in self.open.get(path, ()):
                self.open[path].remove(change)
        if change.outcome == "refused":
            self.refused.setdefault(change.path, []).append(change)  # or its answer was lost, and it was sent again
        elif not change.is_made:
            self._make(change)

    def close(self) -> None:
        """Judge what has no end: who was killed while it deleted a file was not to delete it."""
        for change in [each for changes in self.open.values() for each in changes if each.what == "delete"]:
            self._on_delete(change, is_certain=False)

    def _make(self, change: Change) -> None:
        self.num_effects += len(change.paths)
        change.is_made = True
        if change.what == "delete":
            self._on_delete(change, is_certain=True)
            return
        for path in change.lacking:
            self.fail(change, f"{change.path} was written before {path}")
        before = self._check_condition(change)
        self._check_kind(change, before)
        self.files[change.path] = change
        self.gone.discard(change.path)
        self._note(change)
        self.checker.on_put(change.path, change.content or _THERE)
        if change.path == "CURRENT.json":
            self._note_lists(change)

    def _check_condition(self, change: Change) -> Change | None:
        """Find the version that a put replaces, and whether it is the one that it was to replace."""
        path, before = change.path, self.files.get(change.path)
        if change.condition is None:
            if _CONDITIONAL.fullmatch(path):
                self.fail(change, f"{path} was written without a condition")
            return before
        if change.condition == "absent":
            for each in [each for each in self.open.get(path, ()) if each.what == "delete"]:
                self._on_delete(each, is_certain=True)
                before = self.files.get(path)
            if before is not None and not (change.tag is not None and before.is_of(change.tag)):
                self.fail(change, f"{path} was written as new, and was there")
            # Whoever began before it and has no answer was never there.
            others = self.open.get(path, [])
            self.open[path] = [each for each in others if each.begin_ns > change.begin_ns or each.end_ns is not None]
            return before
        if before is not None and not before.is_of(change.condition):
            for each in [*self.open.get(path, ()), *self.refused.get(path, ())]:
                if each.what == "put" and not each.is_made and each.is_of(change.condition):
                    self._make(each)
                    return self.files.get(path)
            self.fail(change, f"{path} replaced another version than the last one")
        elif before is None and (self.is_whole or path in self.gone):
            maybe = (each for each in self._puts(path) if each is not change and each.is_of(change.condition))
            if made := next(maybe, None):
                self._make(made)
                return self.files.get(path)
            self.fail(change, f"{path} replaced a version that was not there")
        return before

    def _check_kind(self, change: Change, before: Change | None) -> None:
        path, is_new = change.path, before is None
        if _ENTRY.fullmatch(path) and not is_new and before is not None:
            if change.condition == "absent":
                return  # its answer was lost, and it was sent again
            if self.content("purged.json") is None:
                self.fail(change, f"{path} was rewritten, and nothing is purged")
            if before.content is not None and change.content is not None:
                old, new = _parse_entry(before.content), _parse_entry(change.content)
                if (old.added.keys(), old.removed) != (new.added.keys(), new.removed):
                    self.fail(change, f"{path} was rewritten to other files")
        elif _ENTRY.fullmatch(path) and change.condition != "absent" and self.is_whole:
            self.fail(change, f"{path} was not written as new")
        elif _LIST.fullmatch(path) and not is_new and change.condition != "absent":
            self.fail(change, f"{path} was rewritten")
        elif _PART.fullmatch(path) and before is not None:
            is_same = before.tag is None or change.tag == before.tag
            if not is_same and change.condition is None and path in self.checker.needed:
                self.fail(change, f"{path} is published, and was rewritten without a condition")
        elif (index := _INDEX.fullmatch(path)) is not None:
            manifest = self.files.get(f"{path.rpartition('/')[0]}/manifest.json")
            is_after = manifest is not None and change.begin_ns > (manifest.end_ns or manifest.begin_ns)
            if is_after and index["name"] != "claim":
                self.fail(change, f"{path} was written after the manifest next to it")

    def _note(self, change: Change) -> None:
        path = change.path
        if (segment := _SEGMENT.fullmatch(path)) is not None:
            names = self.sealed.setdefault(f"{segment['folder'] or ''}runs/{segment['run']}/journal", set())
            names.update(json.loads(change.content or b"[]"))
        elif (found := _IN_RUN.fullmatch(path)) is not None and found["rest"] == "run.json" and change.content:
            run, folder = json.loads(change.content), f"{found['folder'] or ''}runs/{found['run']}"
            number = int(run.get("session", "").partition("-")[0] or 0)
            if number < self.sessions.get(folder, 0):
                self.fail(change, f"{path}: session {number} after {self.sessions[folder]}")
            self.sessions[folder] = number
            (self.withdrawn.add if run.get("is_withdrawn") else self.withdrawn.discard)(folder)

    def _note_lists(self, change: Change) -> None:
        for token in self._lists_of(change):
            path = f"deletions/{token}.json"
            if token not in self.known_lists and path not in self.ever and self.is_whole:
                self.fail(change, f"CURRENT.json names {path}, which was not there")
            self.known_lists.add(token)
            self.doomed |= self._listed(path)
        self.doomed.update(f"deletions/{token}.json" for token in self.known_lists)
        for path in self.doomed & self.checker.needed:  # a name that was once listed never comes back
            self.checker.fail(f"marked what is published to be deleted: {path}")

    def _lists_of(self, change: Change) -> list[str]:
        return json.loads(change.content or b"{}").get("deleting", [])

    def _on_delete(self, change: Change, *, is_certain: bool) -> None:
        change.is_made = True
        for path in change.paths:
            if is_certain and change in self.open.get(path, ()):
                self.open[path].remove(change)
            is_there = path in self.files or bool(self._puts(path))
            if path in self.checker.needed:
                self._advance()
            if is_there or not self.is_whole or _MADE_IN_PLACE.fullmatch(path):
                if not self._may_go(path, change):
                    self.fail(change, f"{path} was deleted, and no published list named it")
                if path in self.checker.needed and not is_certain and path not in self.files:
                    self.fail(change, f"deleted what is published: {path}")
            if is_certain:
                for each in self.open.pop(path, ()):
                    each.is_made = True  # before that
                self.files.pop(path, None)
                self.gone.add(path)
                self.checker.on_delete(path)

    def _advance(self) -> None:
        """Make a move of CURRENT.json that is under way: who saw it may continue before it has its answer."""
        current = self.files.get("CURRENT.json")
        moves = (each for each in self._puts("CURRENT.json") if not each.is_made)
        if move := next((each for each in moves if current is not None and current.is_of(each.condition)), None):
            self._make(move)

    def _may_go(self, path: str, change: Change) -> bool:
        """Whether a file may be deleted: the kinds are in `docs/store-protocol.md`."""
        return (
            is_unfinished(path)
            or path in self.doomed
            or _MADE_AGAIN.fullmatch(path) is not None
            or self._is_listed(path)
            or self._is_failed_part(path, change)
            or self._may_leave_run(path)
            or self._is_of_new_store(path, change)
        )

    def _is_listed(self, path: str) -> bool:
        """Whether a move of CURRENT.json that is under way lists the file."""
        moves = self._puts("CURRENT.json")
        names = [f"deletions/{token}.json" for each in moves for token in self._lists_of(each)]
        return path in names or any(path in self._listed(name) for name in names)

    def _listed(self, name: str) -> frozenset[str]:
        """Files of a list, which may be deleted by now."""
        if name in self.lists:
            return self.lists[name]
        listed = self.content(name)
        return frozenset(json.loads(listed)) if listed not in (None, b"{}", _THERE) else frozenset()

    def _is_failed_part(self, path: str, change: Change) -> bool:
        """Whether the file is of a write task that failed in the same process, and no entry names it."""
        is_part = _PART.fullmatch(path) is not None or _MOVES.fullmatch(path) is not None
        return is_part and self.writers.get(path) == {change.writer} and path not in self.journalled

    def _may_leave_run(self, path: str) -> bool:
        """Whether the file leaves a run's folder: sealed, the run's input, or of a run that is withdrawn."""
        found = _IN_RUN.fullmatch(path)
        if found is None:
            return False
        folder, entry = f"{found['folder'] or ''}runs/{found['run']}", _JOURNAL.fullmatch(path)
        is_sealed = entry is not None and entry["name"] in self._sealed_in(f"{folder}/journal")
        is_own = found["rest"].startswith(("input/", "preflight")) or found["rest"] == "retrieval_pairs.parquet"
        maybe = (each.content or b"{}" for each in self._puts(f"{folder}/run.json"))
        is_withdrawn = folder in self.withdrawn or any(json.loads(each).get("is_withdrawn") for each in maybe)
        return is_sealed or is_own or is_withdrawn

    def _sealed_in(self, journal: str) -> set[str]:
        maybe = (each for path, changes in self.open.items() if _SEGMENT.fullmatch(path) for each in changes)
        names = (json.loads(each.content or b"[]") for each in maybe if each.path.startswith(f"{journal}/"))
        return self.sealed.get(journal, set()).union(*names)

    def _is_of_new_store(self, path: str, change: Change) -> bool:
        """Whether nothing was ever published, and the file is taken back by who wrote it, or purged."""
        if "CURRENT.json" in self.files or not self.is_whole:
            return False
        return "purged.json" in self.files or self.writers.get(path, {change.writer}) == {change.writer}

    def compare(self, there: Iterable[tuple[str, int]]) -> None:
        found = {path: size for path, size in there if not is_unfinished(path)}
        for path, change in self.files.items():
            is_open = bool(self.open.get(path))
            if path not in found and not is_open:
                self.checker.fail(f"{path} is gone, and nobody has deleted it")
            elif path in found and found[path] != change.size and not is_open:
                self.checker.fail(f"{path} has {found[path]} bytes, and was written with {change.size}")
        for path in found.keys() - self.files.keys() if self.is_whole else ():
            if not self.open.get(path) and not (self.is_on_disk and _NOT_RECORDED.fullmatch(path)):
                self.checker.fail(f"{path} is there, and nobody has written it")
