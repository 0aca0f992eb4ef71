"""States of a store: read as a reader does, checked for wholeness, compared with those of an undisturbed store."""

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from delta_rows import delta_rows
from deltalake.exceptions import TableNotFoundError

import embedder
from embedder.errors import StoreError
from embedder.store.files import StoreFiles
from embedder.store.layout import Current, read_current
from embedder.store.tables import RecordTable
from index.manifest import read_manifest
from index.versions import version_path

MIN_COSINE = 0.9999
EXACT = ("modality", "uri", "caption", "content_version", "model_fingerprint", "preprocess_fingerprint")
ITEM_FACTS = ("content_version", "state", "size_bytes", "modified", "num_vectors")

Key = tuple[str, int]
Fingerprint = frozenset[tuple[str, int, str]]
"""What tells two states apart: item, segment and content of each row."""


def fingerprint(rows: Any) -> Fingerprint:
    """Tell a table's rows from those of other states."""
    return frozenset(zip(*(rows[name].to_pylist() for name in ("item_id", "segment", "content_version")), strict=True))


def state_of(store: Path) -> Fingerprint:
    """What a store has published."""
    return fingerprint(embedder.open_store(store).to_arrow(["item_id", "segment", "content_version"]))


@dataclass
class Difference:
    """How a store differs from an undisturbed one."""

    num_rows: int = 0
    lost: list[Any] = field(default_factory=list)
    duplicated: list[Any] = field(default_factory=list)
    differing: list[Any] = field(default_factory=list)


def compare(store: Path, undisturbed: Path) -> Difference:
    """Compare rows and items of two stores: keys, versions, fingerprints, vectors."""
    found, expected = embedder.open_store(store), embedder.open_store(undisturbed)
    rows, others = found.to_arrow().to_pylist(), expected.to_arrow().to_pylist()
    difference = Difference(num_rows=len(rows))
    by_key = _keyed(rows, difference)
    wanted = _keyed(others, Difference())
    difference.lost += wanted.keys() - by_key.keys()
    difference.differing += by_key.keys() - wanted.keys()
    difference.differing += [key for key in wanted.keys() & by_key.keys() if not _same(by_key[key], wanted[key])]
    items, other_items = ({row["item_id"]: row for row in each.items().to_pylist()} for each in (found, expected))
    if len(items) != found.items().num_rows:
        difference.duplicated.append("items")
    difference.lost += other_items.keys() - items.keys()
    difference.differing += items.keys() - other_items.keys()
    difference.differing += [
        key
        for key in items.keys() & other_items.keys()
        if any(items[key][name] != other_items[key][name] for name in ITEM_FACTS)
    ]
    return difference


def _keyed(rows: list[dict[str, Any]], difference: Difference) -> dict[Key, dict[str, Any]]:
    counts = Counter((row["item_id"], row["segment"]) for row in rows)
    difference.duplicated += [key for key, num in counts.items() if num > 1]
    return {(row["item_id"], row["segment"]): row for row in rows}


def _same(row: dict[str, Any], other: dict[str, Any]) -> bool:
    if any(row[name] != other[name] for name in EXACT):
        return False
    return all(_same_vector(row[name], other[name]) for name in ("image_embedding", "text_embedding"))


def _same_vector(vector: list[float] | None, other: list[float] | None) -> bool:
    if vector is None or other is None:
        return vector is other
    return bool(np.dot(vector, other) >= MIN_COSINE)


class Poller(threading.Thread):
    """Opens what is published all the while, as searches do, and both tables as other programs do."""

    def __init__(self, store: Path) -> None:
        super().__init__(name="reader", daemon=True)
        self.allowed: list[Fingerprint] = [frozenset()]
        """States that may be seen: each that the source was in."""
        self.num_polls = 0
        self.seen: list[Fingerprint] = []
        """States in the order of their first sight."""
        self.faults: list[str] = []
        self._store, self._stopped = store, threading.Event()

    def run(self) -> None:
        """Poll until told to stop."""
        while not self._stopped.is_set():
            try:
                self.poll()
            except (StoreError, OSError, ValueError) as error:
                self.faults.append(f"{type(error).__name__}: {error}")
            time.sleep(0.02)

    def stop(self) -> None:
        """Stop polling, and wait for the last look."""
        self._stopped.set()
        self.join()

    def poll(self) -> None:
        """Look once."""
        self.num_polls += 1
        files = StoreFiles(self._store)
        self._look_at_newest(files)
        current = read_current(files) if files.exists("CURRENT.json") else None
        if current is None:
            return
        state = self._whole_state(files, current)
        if state not in self.allowed:
            self.faults.append(f"run {current.run_id}: {len(state)} rows that are no state of the source")
        elif state not in self.seen:
            self.seen.append(state)

    def _whole_state(self, files: StoreFiles, current: Current) -> Fingerprint:
        """The published rows; items, rows and index must belong together."""
        rows = RecordTable(files, "embeddings", current.embeddings).read(["item_id", "segment", "content_version"])
        items = RecordTable(files, "items", current.items).read(["item_id", "num_vectors"]).to_pylist()
        num_found = Counter(rows["item_id"].to_pylist())
        num_stated = {item["item_id"]: item["num_vectors"] for item in items if item["num_vectors"]}
        if num_found != Counter(num_stated):
            self.faults.append(f"run {current.run_id}: items and embeddings do not belong together")
        if len(set(zip(rows["item_id"].to_pylist(), rows["segment"].to_pylist(), strict=True))) != rows.num_rows:
            self.faults.append(f"run {current.run_id}: a row stands twice")
        state = fingerprint(rows)
        if current.index is not None and self._state_of_index(files, current.index) != state:
            self.faults.append(f"run {current.run_id}: the index is of another state")
        return state

    def _state_of_index(self, files: StoreFiles, number: int) -> Fingerprint:
        """The rows that an index was built of; a compaction keeps that of the version before, of equal rows."""
        version = read_manifest(version_path(Path(files.uri("index")), number)).embeddings_version
        return fingerprint(RecordTable(files, "embeddings", version).read(["item_id", "segment", "content_version"]))

    def _look_at_newest(self, files: StoreFiles) -> None:
        """Programs that know no CURRENT.json may be one commit ahead, never in the middle of one."""
        try:
            rows = delta_rows(files.uri("embeddings"), columns=["item_id", "segment", "content_version"])
        except TableNotFoundError:
            return
        if rows.num_rows and fingerprint(rows) not in self.allowed:
            self.faults.append(f"newest embeddings: {rows.num_rows} rows that are no state")
