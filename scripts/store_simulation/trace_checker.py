"""Rules of the store's protocol for a recorded trace, beside the invariants of `Checker`: who wrote what, when and how.

Of two processes' effects whose times overlap no order is known, and of one that has no end (its process was killed, or
had no answer) not whether it was made. Such an effect counts as made where another one shows that it was, else in
favour of the store.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from embedder.store.backends import is_unfinished
from store_simulation.checker import TABLES, Checker

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


def is_withdrawn(content: bytes | None) -> bool:
    return bool(json.loads(content or b"{}").get("is_withdrawn"))


def folder_of(path: str) -> str:
    return "/".join([*path.split("/")[:2], ""]) if path.startswith("models/") else ""


def files_of(content: bytes | None) -> tuple[list[str], list[str]]:
    """Part files that an entry of a log adds and removes."""
    actions = [json.loads(line) for line in (content or b"").decode().splitlines() if line.strip()]
    added, removed = ([each[kind]["path"] for each in actions if kind in each] for kind in ("add", "remove"))
    return added, removed


def needed_first(content: bytes | None) -> list[str]:
    """Files that must be there before CURRENT.json names them, beside the older entries of logs."""
    if content is None:
        return []
    current = json.loads(content)
    paths = [f"runs/{current['run_id']}/published.json"]
    for model, own in {"": current, **current.get("models", {})}.items():
        folder = f"models/{model}/" if model else ""
        paths += [f"{folder}{name}/_delta_log/{own[name]:020d}.json" for name in TABLES if own[name] >= 0]
        paths += [f"{folder}index/{own['index']:06d}/manifest.json"] if own.get("index") is not None else []
    return paths


_PART = re.compile(MODEL + r"(items|embeddings)/part-(?P<run>[^/]+)\.parquet")
_ENTRY = re.compile(MODEL + r"(items|embeddings)/_delta_log/\d{20}\.json")
_CHECKPOINT = re.compile(MODEL + r"(items|embeddings)/_delta_log/\d{20}\.checkpoint\.parquet")
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
        self.checker.attach(self.content)

    @property
    def deviations(self) -> list[str]:
        return self.checker.violations

    def fail(self, change: Change, text: str) -> None:
        host, pid = change.writer
        self.checker.fail(f"{text} (process {pid} on {host}, at {change.begin_ns / 1e9:.3f} s)")

    def content(self, path: str) -> bytes | None:
        """Content of a file, or a placeholder; None where it is not there."""
        if (found := self.files.get(path)) is not None:
            return found.content if found.content is not None else self._left_out(path, found)
        if path in self.gone:
            return None
        if maybe := self.open.get(path):
            for each in maybe:
                if each.what == "put":
                    return each.content if each.content is not None else _THERE
        is_unrecorded = self.is_on_disk and _MADE_IN_PLACE.fullmatch(path) is not None
        if self.is_whole and not is_unrecorded:
            return None
        return _THERE if self.earlier is None or path in self.will_go else self.earlier(path)

    def _left_out(self, path: str, found: Change) -> bytes | None:
        if _ENTRY.fullmatch(path) or path.endswith(".json"):
            return (self.earlier(path) if self.earlier is not None else None) or b"{}"
        return _THERE if found.size else b""

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
        elif _JOURNAL.fullmatch(change.path) and change.content:
            folder = folder_of(change.path)
            parts = [f"{folder}{part}" for part in json.loads(change.content)["parts"]]
            change.lacking = [part for part in parts if self.is_whole and part not in self.ever]
            self.journalled.update(parts)
        elif _LIST.fullmatch(change.path) and change.content is not None:
            self.lists[change.path] = frozenset(json.loads(change.content))
        elif _ENTRY.fullmatch(change.path) and change.content is not None:
            table = change.path.partition("/_delta_log/")[0]
            added = [f"{table}/{each}" for each in files_of(change.content)[0]]
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
        for changes in list(self.open.values()):
            for change in changes:
                if change.what == "delete":
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
            self._never_made(change)
            return before
        if before is not None and not before.is_of(change.condition):
            for each in [*self.open.get(path, ()), *self.refused.get(path, ())]:
                if each.what == "put" and not each.is_made and each.is_of(change.condition):
                    self._make(each)
                    return self.files.get(path)
            self.fail(change, f"{path} replaced another version than the last one")
        elif before is None and (self.is_whole or path in self.gone):
            maybe = [each for each in self.open.get(path, ()) if each.what == "put" and each is not change]
            if made := next((each for each in maybe if each.is_of(change.condition)), None):
                self._make(made)
                return self.files.get(path)
            self.fail(change, f"{path} replaced a version that was not there")
        return before

    def _never_made(self, change: Change) -> None:
        """Who wrote a file as new shows that nobody had before."""
        others = self.open.get(change.path, [])
        self.open[change.path] = [each for each in others if each.begin_ns > change.begin_ns or each.end_ns is not None]

    def _check_kind(self, change: Change, before: Change | None) -> None:
        path, is_new = change.path, before is None
        if _ENTRY.fullmatch(path) and not is_new and before is not None:
            if change.condition == "absent":
                return  # its answer was lost, and it was sent again
            if self.content("purged.json") is None:
                self.fail(change, f"{path} was rewritten, and nothing is purged")
            if None not in (before.content, change.content) and files_of(before.content) != files_of(change.content):
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
                self.fail(change, f"{path} was written after the manifest beside it")

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
            is_there = path in self.files or any(each.what == "put" for each in self.open.get(path, ()))
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
        """Make a move of CURRENT.json that is under way: who saw it may go on before it has its answer."""
        current = self.files.get("CURRENT.json")
        for each in list(self.open.get("CURRENT.json", ())):
            if each.what == "put" and not each.is_made and current is not None and current.is_of(each.condition):
                self._make(each)
                return

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
        changes = [each for each in self.open.get("CURRENT.json", ()) if each.what == "put"]
        names = [f"deletions/{token}.json" for each in changes for token in self._lists_of(each)]
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
        maybe = (each for each in self.open.get(f"{folder}/run.json", ()) if each.what == "put")
        may_leave = folder in self.withdrawn or any(is_withdrawn(each.content) for each in maybe)
        return is_sealed or is_own or may_leave

    def _sealed_in(self, journal: str) -> set[str]:
        """Entries that segments of a journal hold, made or under way."""
        maybe = (each for path, changes in self.open.items() if _SEGMENT.fullmatch(path) for each in changes)
        names = (json.loads(each.content or b"[]") for each in maybe if each.path.startswith(f"{journal}/"))
        return self.sealed.get(journal, set()).union(*names)

    def _is_of_new_store(self, path: str, change: Change) -> bool:
        """Whether nothing was ever published, and the file is taken back by who wrote it, or purged."""
        if "CURRENT.json" in self.files or not self.is_whole:
            return False
        return "purged.json" in self.files or self.writers.get(path, {change.writer}) == {change.writer}

    def compare(self, there: Iterable[tuple[str, int]]) -> None:
        """Compare the files that the trace leaves with those that are there."""
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
