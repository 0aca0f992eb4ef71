"""Operations on a store have the same results in a bucket as on a disk."""

import numpy as np
import pytest
from store_samples import row
from store_states import build_store_index, new_store, no_index, publish_refresh, state_now
from test_store_sequences import Model

from embedder.retrieval.store_api import open_store
from embedder.store.files import StoreFiles
from embedder.store.layout import read_current, utc_now
from embedder.store.lock import LeaseLostError, write_lock
from embedder.store.maintenance.compact import PartTarget, compact
from embedder.store.maintenance.purge.purge import purge
from embedder.store.maintenance.rollback import release, rollback
from embedder.store.maintenance.vacuum import vacuum
from embedder.store.publish.current import move_current
from embedder.store.publish.history import past_runs
from embedder.store.tables.tables import RecordTable
from embedder.store_index.index_versions import list_manifests
from embedder.store_index.keep_index import index_choice

pytestmark = pytest.mark.medium

UP, DOWN = [0.0, 1.0], [0.0, -1.0]
DIFFER = ("run_id", "embedded_at", "updated_at")


def life(files: StoreFiles) -> list:
    """Everything that is done to a store, and what it holds after each step, times and run ids aside."""
    seen: list = []

    def look(*more: object) -> None:
        state = {
            name: {key: {k: v for k, v in row.items() if k not in DIFFER} for key, row in rows.items()}
            for name, rows in state_now(files).items()
        }
        current = read_current(files)
        hits = open_store(files.address).search(np.array(UP, np.float32), 9)
        found = sorted((hit.item_id, hit.score) for hit in hits)
        kinds = [(run.record and run.record.kind, run.can_be_read) for run in past_runs(files)]
        versions = (current.embeddings, current.items, current.index)
        seen.append((state, versions, found, kinds, [number for number, _ in list_manifests(files)], *more))

    publish_refresh(files, row("a.jpg"), row("b.jpg"), row("c.jpg", image_embedding=DOWN))
    look()
    build_store_index(files)
    look()
    for number in range(4):
        publish_refresh(
            files, row("b.jpg", image_embedding=UP, modified=f"t{number}"), row(f"new-{number}.jpg"), retired=["c.jpg"]
        )
    look()
    with write_lock(files):
        _, compactions = compact(files, PartTarget())
        look([(each.num_files_before, each.num_files_after) for each in compactions])
        rollback(files, None, index_choice(files))
        look()
        done = purge(files, ["b.jpg"], index_choice(files, reuse=False))
        look(
            done.plan.num_published, done.plan.num_vectors, len(done.plan.versions), done.unreadable, done.scan.found_in
        )
        deleted = vacuum(files, keep_days=0, keep_versions=1).deleted
        look(sorted(info.path.split("/")[0] for info in deleted))
    return seen


@pytest.mark.slow
def test_a_life_of_a_store_is_the_same_on_a_disk_and_in_a_bucket(tmp_path, bucket, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    on_disk = life(new_store(tmp_path / "store"))
    in_bucket = life(new_store(f"{bucket}/store"))
    for step, (expected, found) in enumerate(zip(on_disk, in_bucket, strict=True)):
        assert found == expected, f"step {step}"
    ids = RecordTable(StoreFiles(f"{bucket}/store"), "items").read(["item_id"])["item_id"].to_pylist()
    assert "b.jpg" not in ids


def test_the_same_sequence_of_operations_leaves_the_same_rows_and_versions(tmp_path, bucket):
    disk, there = (Model(new_store(place), seed=2) for place in (tmp_path / "store", f"{bucket}/store"))
    for _ in range(5):
        assert disk.step() == there.step()
        there.check()
        assert there.now == disk.now
        runs = [[(run.is_current, run.can_be_read) for run in past_runs(model.files)] for model in (disk, there)]
        assert runs[0] == runs[1]


def test_a_hold_is_set_and_released_on_condition_that_nobody_published_meanwhile(bucket):
    files = new_store(f"{bucket}/store")
    first = publish_refresh(files, row("a.jpg"))
    publish_refresh(files, row("b.jpg"))
    with write_lock(files):
        rollback(files, None, no_index)
    held = read_current(files)
    assert (held.is_held, held.hold.to_run) == (True, first.run_id)
    stranger = held.model_copy(update={"published_at": utc_now()})
    with write_lock(files):
        move_current(StoreFiles(files.address), stranger)
        with pytest.raises(LeaseLostError, match="another run published while this one held the lock"):
            rollback(files, held.previous, no_index)
    with write_lock(files):
        move_current(StoreFiles(files.address), held)
        with pytest.raises(LeaseLostError):
            release(files)
    assert read_current(files) == held, "as the stranger left it"
    with write_lock(files):
        assert release(files).released_at is not None
    assert not read_current(files).is_held
