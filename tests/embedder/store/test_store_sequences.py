"""After any sequence of operations, the version that CURRENT.json names exists, is whole and has the expected rows."""

import random
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest
from store_samples import row
from store_states import Killed, dying, new_store, no_index, publish_refresh, rows_at, state_now, vectors_now

from embedder.errors import StoreError
from embedder.plugins.maintain.purge.audit import scan_store
from embedder.plugins.maintain.purge.id_matcher import ItemNames
from embedder.plugins.maintain.purge.purge import purge
from embedder.plugins.maintain.vacuum import vacuum
from embedder.retrieval.store_api import open_store
from embedder.store.files import StoreFiles
from embedder.store.layout import read_current
from embedder.store.maintenance.compact import PartTarget, compact
from embedder.store.maintenance.rollback import rollback
from embedder.store.publish.history import past_runs, publications
from embedder.store.publish.publish import finish_publication
from embedder.store.tables.tables import RecordTable

ITEMS = [f"item-{number:02d}.jpg" for number in range(12)]


class Model:
    """Expected content of a store: the vectors that are published, and those of each readable version."""

    def __init__(self, files: StoreFiles, seed: int) -> None:
        self.files, self.random = files, random.Random(seed)
        self.now: dict[str, list[float]] = {}
        self.versions: dict[str, dict[str, list[float]]] = {}
        self.purged: set[str] = set()
        self.clock = 0
        self.new: dict[str, list[float]] = {}

    def step(self) -> str:
        """Do one thing to the store; returns what."""
        names = ["publish_refresh"] * 4 + ["rollback", "compact", "vacuum", "purge"]
        name = self.random.choice(names if self.versions else ["publish_refresh"])
        getattr(self, name)()
        if name != "vacuum" or not self.versions:
            self.versions[read_current(self.files).run_id] = dict(self.now)
        return name

    def vector(self) -> list[float]:
        self.clock += 1
        return np.array([np.cos(self.clock), np.sin(self.clock)], np.float32).tolist()

    def publish_refresh(self) -> None:
        allowed = [item for item in ITEMS if item not in self.purged]
        chosen = self.random.sample(allowed, self.random.randint(0, min(4, len(allowed))))
        self.new = new = {item: self.vector() for item in chosen}
        gone = [item for item in self.now if item not in new and self.random.random() < 0.15]
        rows = [row(item, image_embedding=vector, modified=str(self.clock)) for item, vector in new.items()]
        publish_refresh(self.files, *rows, retired=gone)
        self.now = {item: vector for item, vector in (self.now | new).items() if item not in gone}

    def rollback(self) -> None:
        readable = [run for run in past_runs(self.files) if run.can_be_read and not run.is_current]
        if not readable:
            with pytest.raises(StoreError):
                rollback(self.files, None, no_index)
            return
        target = self.random.choice(readable).run_id
        rollback(self.files, target, no_index)
        self.now = dict(self.versions[target])

    def compact(self) -> None:
        compact(self.files, PartTarget(num_rows=self.random.choice([4, 1000])))

    def vacuum(self) -> None:
        vacuum(self.files, keep_days=self.random.choice([0, 7]), keep_versions=self.random.randint(1, 3))

    def purge(self) -> None:
        known = [item for item in ITEMS if item in self.now or item in self.purged]
        items = set(self.random.sample(known, min(2, len(known))))
        purge(self.files, items, no_index)
        self.purged |= items
        self.now = self.without(self.now, items)
        self.versions = {run_id: self.without(rows, items) for run_id, rows in self.versions.items()}

    @staticmethod
    def without(rows: dict, items: set) -> dict:
        return {item: vector for item, vector in rows.items() if item not in items}

    def check(self) -> None:
        """Compare the store with what it should hold."""
        assert vectors_now(self.files) == self.now
        current = read_current(self.files)
        assert {item for item, _ in rows_at(self.files, current, "items")} == set(self.now)
        newest = RecordTable(self.files, "embeddings")
        assert sorted(newest.paths()) == sorted(RecordTable(self.files, "embeddings", current.embeddings).paths())
        for run in past_runs(self.files):
            if run.can_be_read:
                then = {item: each["image_embedding"] for (item, _), each in rows_at(self.files, run.record).items()}
                assert then == self.versions[run.run_id]
        last = publications(self.files)[-1]
        assert (last.run_id, last.num_vectors) == (current.run_id, len(self.now))


@pytest.mark.medium
@pytest.mark.parametrize("seed", range(3))
def test_any_sequence_of_operations_leaves_what_was_expected(tmp_path, seed):
    model = Model(new_store(tmp_path / "store"), seed)
    for _ in range(14):
        model.step()
        model.check()
    if model.purged:
        assert scan_store(model.files, ItemNames(model.purged)).found_in == ()


@pytest.mark.parametrize("seed", range(100, 106))
def test_an_operation_killed_anywhere_in_a_sequence_is_as_if_it_was_not_or_was_done(tmp_path, monkeypatch, seed):
    model = Model(new_store(tmp_path / "store"), seed)
    for _ in range(6):
        model.step()
    rng = random.Random(seed)
    before = state_now(model.files)
    copy = StoreFiles(tmp_path / "copy")
    shutil.copytree(model.files.folder, copy.folder)
    twin = Model(copy, 0)
    twin.__dict__.update(model.__dict__ | {"files": copy, "now": dict(model.now), "versions": dict(model.versions)})
    twin.purged, twin.random = set(model.purged), random.Random(seed)
    model.random = random.Random(seed)
    model.step()
    after = {item: each["image_embedding"] for (item, _), each in state_now(model.files)["embeddings"].items()}
    with dying(monkeypatch, rng.randint(0, 6)), suppress(Killed):
        twin.step()
    seen = vectors_now(copy)
    assert seen in (after, {item: each["image_embedding"] for (item, _), each in before["embeddings"].items()})
    finish_publication(copy)
    seen = vectors_now(copy)
    publish_refresh(copy, row("later.jpg"))
    later = [1.0, 0.0]
    # A refresh that was cut off is resumed.
    assert vectors_now(copy) in (seen | {"later.jpg": later}, seen | twin.new | {"later.jpg": later})
    assert {item for item, _ in rows_at(copy, read_current(copy), "items")} == set(vectors_now(copy))


@pytest.mark.medium
@pytest.mark.parametrize("is_remote", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_reader_that_polls_all_the_while_sees_published_states_only(tmp_path, request, is_remote):
    place = f"{request.getfixturevalue('bucket')}/store" if is_remote else tmp_path / "store"
    model = Model(new_store(place), seed=7)
    model.publish_refresh()
    states, seen, ended = [dict(model.now)], [], threading.Event()

    def poll() -> None:
        while not ended.is_set():
            store = open_store(model.files.address)
            vectors = {row["item_id"]: row["image_embedding"] for row in store.to_arrow().to_pylist()}
            seen.append((vectors, set(store.items()["item_id"].to_pylist())))

    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(poll)
        refresh = model.publish_refresh
        try:
            for operation in (refresh, model.compact, model.rollback, refresh, lambda: vacuum(model.files)) * 3:
                states.append(dict(model.now))
                model.versions[read_current(model.files).run_id] = dict(model.now)
                operation()
                states.append(dict(model.now))
        finally:
            ended.set()
        reader.result()
    assert len(seen) > 10
    for vectors, items in seen:
        assert vectors in states
        assert items == set(vectors)
