"""States of a store: read as a reader does, checked for wholeness, compared with those of an undisturbed store."""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from delta_rows import delta_rows
from deltalake.exceptions import TableNotFoundError

import embedder
from embedder.errors import StoreError
from embedder.store.files import StoreFiles
from embedder.store.layout import Current, read_current
from embedder.store.tables.models import model_files
from embedder.store.tables.tables import RecordTable
from embedder.store_index.versions import fetched_manifest

MIN_COSINE = 0.9999
EXACT = ("modality", "uri", "caption", "content_version", "model_fingerprint", "preprocess_fingerprint")
OF_STEP = ("region", "side")  # columns, where runs have one
ITEM_FACTS = ("content_version", "state", "size_bytes", "modified", "num_vectors")

Fingerprint = frozenset[tuple[str, int, str]]
"""What tells two states apart: item, segment and content of each row."""


def fingerprint(rows: Any) -> Fingerprint:
    """Tell a table's rows from those of other states."""
    return frozenset(zip(*(rows[name].to_pylist() for name in ("item_id", "segment", "content_version")), strict=True))


def items_in(state: Fingerprint) -> set[tuple[str, Fingerprint]]:
    """Items of a state, each with its rows."""
    rows: dict[str, set[tuple[str, int, str]]] = {}
    for row in state:
        rows.setdefault(row[0], set()).add(row)
    return {(item_id, frozenset(found)) for item_id, found in rows.items()}


def state_of(store: Path | str) -> Fingerprint:
    """What a store has published."""
    return fingerprint(embedder.open_store(store).to_arrow(["item_id", "segment", "content_version"]))


def compare(store: Path | str, undisturbed: Path) -> tuple[int, dict[str, list[Any]]]:
    """Compare rows and items of all models of two stores: keys, versions, fingerprints, vectors; and count the rows."""
    num_rows, difference = 0, {"lost": [], "duplicated": [], "differing": []}
    for model in (None, *embedder.open_store(undisturbed).models):
        num_rows += _compare_model(store, undisturbed, model, difference)
    return num_rows, difference


def _compare_model(store: Path | str, undisturbed: Path, model: str | None, difference: dict[str, list[Any]]) -> int:
    """Compare the rows and items of one model; gives the number of its rows."""
    found, expected = (embedder.open_store(each, model=model) for each in (store, undisturbed))
    rows = found.to_arrow()
    for ours, theirs, key, facts in (
        (rows, expected.to_arrow(), ("item_id", "segment"), EXACT),
        (found.items(), expected.items(), ("item_id",), ITEM_FACTS),
    ):
        by_key, wanted = _by_key(ours, key), _by_key(theirs, key)
        difference["duplicated"] += [key for key, rows_of in by_key.items() if len(rows_of) > 1]
        difference["lost"] += wanted.keys() - by_key.keys()
        difference["differing"] += by_key.keys() - wanted.keys()
        common = wanted.keys() & by_key.keys()
        difference["differing"] += [key for key in common if not _same(by_key[key][-1], wanted[key][-1], facts)]
    return rows.num_rows


def _by_key(table: pa.Table, key: Sequence[str]) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in table.to_pylist():
        found.setdefault(tuple(row[name] for name in key), []).append(row)
    return found


def _same(row: dict[str, Any], other: dict[str, Any], facts: Sequence[str]) -> bool:
    if any(row.get(name) != other.get(name) for name in (*facts, *OF_STEP)):
        return False
    return all(_same_vector(row.get(name), other.get(name)) for name in ("image_embedding", "text_embedding"))


def _same_vector(vector: list[float] | None, other: list[float] | None) -> bool:
    if vector is None or other is None:
        return vector is other
    return bool(np.dot(vector, other) >= MIN_COSINE)


class Poller(threading.Thread):
    """Opens what is published all the while, as searches do, and on a disk both tables as other programs do."""

    def __init__(self, store: Path | str, *, may_mix: bool = False) -> None:
        super().__init__(name="reader", daemon=True)
        self.may_mix = may_mix
        """Whether each item may be of another state, as runs publish while they go on."""
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
            time.sleep(0.02 if isinstance(self._store, Path) else 1.0)  # the bucket's server has one thread

    def stop(self) -> None:
        """Stop polling, and wait for the last look."""
        self._stopped.set()
        self.join()

    def _is_allowed(self, state: Fingerprint) -> bool:
        if not self.may_mix or state in self.allowed:
            return state in self.allowed
        return items_in(state) <= set().union(*map(items_in, self.allowed))

    def poll(self) -> None:
        """Look once."""
        self.num_polls += 1
        files = StoreFiles(self._store)
        if isinstance(self._store, Path):
            self._look_at_newest(files)
        current = read_current(files) if files.exists("CURRENT.json") else None
        if current is None:
            return
        state = self._whole_state(files, current)
        for name, own in current.models.items():
            if not self.may_mix and self._whole_state(model_files(files, name), own) != state:
                self.faults.append(f"run {current.run_id}: model {name} is of another state than the main one")
        if not self._is_allowed(state):
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
        version = fetched_manifest(files, number).embeddings_version
        return fingerprint(RecordTable(files, "embeddings", version).read(["item_id", "segment", "content_version"]))

    def _look_at_newest(self, files: StoreFiles) -> None:
        """Programs that know no CURRENT.json may be one commit ahead, never in the middle of one."""
        try:
            rows = delta_rows(files.uri("embeddings"), columns=["item_id", "segment", "content_version"])
        except TableNotFoundError:
            return
        if rows.num_rows and not self._is_allowed(fingerprint(rows)):
            self.faults.append(f"newest embeddings: {rows.num_rows} rows that are no state")
