"""Invariants of a store, checked at every change of it, and a model of its publications over sets of items.

The same checker reads what a simulation does and what a real run has recorded (`scripts/check_store_trace.py`).
"""

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

TABLES = ("embeddings", "items")
SAME_ROWS = ("compaction", "migration", "index", "vacuum")
_LIGHT_PART = re.compile(r"(models/[^/]+/)?(items|embeddings)/part-[^/]+\.parquet")


class Version(NamedTuple):
    """Rows of a publication: item -> version, of each table."""

    items: dict[str, str]
    embeddings: dict[str, str]


class Effect(NamedTuple):
    """Entry of a log as the model reads it."""

    added: frozenset[str]
    removed: frozenset[str]


@lru_cache(maxsize=20_000)
def _parse_entry(content: bytes) -> Effect:
    actions = [json.loads(line) for line in content.decode().splitlines() if line.strip()]
    added = frozenset(each["add"]["path"] for each in actions if "add" in each)
    return Effect(added, frozenset(each["remove"]["path"] for each in actions if "remove" in each))


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
    written: set[tuple[str, str]] = field(default_factory=set)
    states: dict[str, Version] = field(default_factory=dict)
    current: dict[str, Any] | None = None
    needed: frozenset[str] = frozenset()
    marked: set[str] = field(default_factory=set)
    last_writer: dict[str, Any] = field(default_factory=dict)
    num_changes: int = 0
    content: Callable[[str], bytes | None] = lambda path: None

    def attach(self, content: Callable[[str], bytes | None]) -> None:
        self.content = content

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
        if before is not None:
            self._check_marks()
        is_new = before is None or before["run_id"] != run_id
        if self.has_rows:
            self._check_move(previous, version, run_id, is_new=is_new)
        else:
            self._check_record(run_id, is_new=is_new)
        self.states[run_id] = version
        if writer is not None:
            writer.notes["published"] = version

    def _check_marks(self) -> None:
        for name in (self.current or {}).get("deleting", ()):
            listed = self.content(f"deletions/{name}.json")
            if listed is not None:
                for path in set(_parse_json(listed)) & self.needed:
                    self.fail(f"marked what is published to be deleted: {path}")

    def _check_rows(self, cause: str) -> Version | None:
        current, needed, rows = self.current or {}, {"CURRENT.json"}, {}
        needed.add(f"runs/{current.get('run_id')}/published.json")
        for model, own in {"": current, **current.get("models", {})}.items():
            folder = f"models/{model}/" if model else ""
            for name in TABLES:
                paths = self._paths(folder + name, own[name], needed)
                if paths is None:
                    self.fail(
                        f"CURRENT can't be read: the log of {folder}{name} lacks an entry up to {own[name]}; {cause}"
                    )
                    return None
                files = [f"{folder}{name}/{path}" for path in paths]
                needed.update(files)
                if lacking := [path for path in files if not self.content(path)]:
                    self.fail(f"CURRENT can't be read: {lacking[0]} is gone or empty; {cause}")
                    return None
                if self.has_rows and not model:
                    rows[name] = self._rows(name, files)
            if own.get("index") is not None:
                needed.update(self._index_files(folder, own["index"]))
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
        return self._paths(table, len(entries) - 1, set()) or set()

    def _index_files(self, folder: str, number: int) -> set[str]:
        path = f"{folder}index/{number:06d}"
        if self.content(f"{path}/manifest.json") is None:
            self.fail(f"CURRENT names an index that is not there: {path}")
        return {f"{path}/{name}" for name in ("manifest.json", "vectors.faiss")}

    def _rows(self, name: str, files: Collection[str]) -> dict[str, str]:
        found: dict[str, str] = {}
        for path in files:
            for row in _parse_json(self.content(path) or b"[]"):
                if row["item_id"] in found:
                    self.fail(f"{name} holds item {row['item_id']} twice")
                found[row["item_id"]] = row["version"]
        return found

    def _paths(self, table: str, version: int, needed: set[str]) -> set[str] | None:
        held: set[str] = set()
        for number in range(version + 1):
            path = f"{table}/_delta_log/{number:020d}.json"
            content = self.content(path)
            if not content:
                return None
            needed.add(path)
            entry = _parse_entry(content)
            held -= entry.removed
            held |= entry.added
        return held

    def _check_record(self, run_id: str, *, is_new: bool, num_items: int | None = None) -> str:
        """Compare the record of a publication with what is published; gives its kind."""
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
            target = self.states.get((self.current or {}).get("restores") or "")
            expected = None if target is None else {each: own for each, own in target.items.items() if each in new}
            if (
                target is None
                or expected != new
                or any(each not in new and each not in self.being_purged for each in target.items)
            ):
                self.fail(f"rollback {run_id} did not bring back {(self.current or {}).get('restores')}")
        elif kind == "purge":
            gone, others = old.keys() - new.keys(), {each: own for each, own in old.items() if each in new}
            if others != new or not gone <= self.being_purged:
                self.fail(f"purge {run_id} changed other rows: {_differing(old, new)}")
        else:
            if lost := {each for each in old if each not in new} - self.retired:
                self.fail(f"{kind} {run_id} lost {sorted(lost)}")
            if foreign := {each for each in new.items() if old.get(each[0]) != each[1]} - self.written:
                self.fail(f"{kind} {run_id} published rows that nobody wrote: {sorted(foreign)}")

    @property
    def published(self) -> Version | None:
        return self.states.get((self.current or {}).get("run_id", ""))

    @property
    def being_purged(self) -> set[str]:
        return self.purge_begun | self.purged

    purge_begun: set[str] = field(default_factory=set)
    unfinished_purges: set[str] = field(default_factory=set)


def _differing(old: dict[str, str], new: dict[str, str]) -> list[str]:
    return sorted(each for each in old.keys() | new.keys() if old.get(each) != new.get(each))
