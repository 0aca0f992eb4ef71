"""Operations on a store have the same results in a bucket as on a disk."""

from collections import Counter

import pytest
from store_samples import row
from store_states import new_store, no_index, publish_refresh
from test_store_sequences import Model

from embedder.store.files import StoreFiles
from embedder.store.layout import read_current, utc_now
from embedder.store.lock import LeaseLostError, write_lock
from embedder.store.maintenance.rollback import release, rollback
from embedder.store.publish.current import move_current
from embedder.store.publish.history import past_runs

pytestmark = pytest.mark.medium


def test_the_same_sequence_of_operations_leaves_the_same_rows_and_versions(tmp_path, bucket):
    disk, there = (Model(new_store(place), seed=2) for place in (tmp_path / "store", f"{bucket}/store"))
    for _ in range(5):
        assert disk.step() == there.step()
        there.check()
        assert there.now == disk.now
        runs = [[(run.is_current, run.can_be_read) for run in past_runs(model.files)] for model in (disk, there)]
        assert runs[0] == runs[1]
        files = [Counter(info.path.split("/")[0] for info in model.files.list("")) for model in (disk, there)]
        assert files[0] == files[1], "the same is made and deleted"


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
