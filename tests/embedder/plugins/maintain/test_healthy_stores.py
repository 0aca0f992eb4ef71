"""A store after whatever its commands do is clean, and a check of it changes nothing."""

import os

import numpy as np
import pyarrow as pa
import pytest
from index_stores import indexed_run, indexed_store, item, unit
from model_stores import add_model, label_row, vector_row
from refresh_runs import contents
from store_samples import begin, reject, row, table
from store_states import new_store, publish_refresh

from embedder.batch_schema import LEFT_OUT
from embedder.plugins.maintain.purge.purge import purge
from embedder.plugins.maintain.store_check import check as check_module
from embedder.plugins.maintain.store_check.check import check_store
from embedder.plugins.maintain.store_check.findings import Finding
from embedder.plugins.maintain.vacuum import vacuum
from embedder.store.files import StoreFiles
from embedder.store.journal.part_writer import write_part
from embedder.store.layout import read_current
from embedder.store.lock import write_lock
from embedder.store.maintenance.compact import PartTarget, compact
from embedder.store.maintenance.rollback import release, rollback
from embedder.store.tables.tables import RecordTable
from embedder.store_index.keep_index import index_choice, same_index_and_words


def assert_clean(files, *, but=()):
    """Check it both ways; no finding but some notes by their places."""
    for deep in (False, True):
        found = check_store(StoreFiles(files.address), deep=deep)
        assert [each.text for each in found.findings if each.place not in but] == []
    return found


@pytest.mark.medium
def test_a_store_with_all_that_one_can_have_is_clean_after_each_command(tmp_path):
    files = indexed_store(tmp_path / "store", 60)
    assert (tmp_path / "store" / "words").is_dir()
    assert_clean(files)
    vectors = unit(np.random.default_rng(0).standard_normal((3, 16)))
    ids = [f"{number:04d}.jpg" for number in range(3)]
    add_model(files, "clip", *(vector_row(*each) for each in zip(ids, vectors, strict=True)))
    add_model(files, "tags", *map(label_row, ids), has_vectors=False, label=pa.array(["x", "y", "z"]))
    first = assert_clean(files)
    assert {name: each.num_vectors for name, each in first.models.items()} == {"": 60, "clip": 3, "tags": 3}
    indexed_run(files, item(3, 1), item(70), retired=["0007.jpg"])
    assert_clean(files)
    with write_lock(files):
        rollback(files, None, index_choice(files))
        assert_clean(files, but=[".lock"])
        release(files)
        compact(files, PartTarget(num_rows=1000), choose_index=same_index_and_words(files))
        assert_clean(files, but=[".lock"])
        purge(files, ["0001.jpg"], index_choice(files, reuse=False))
        assert_clean(files, but=[".lock"])
        vacuum(files, keep_days=0, keep_versions=1)
    found = assert_clean(files)
    assert found.readable == (read_current(files).run_id,)
    assert (len(found.publications), found.models[""].num_items) == (7, 59)


def test_rejects_and_stale_items_are_as_their_records_tell(tmp_path):
    files = new_store(tmp_path / "store")
    publish_refresh(files, row("a.jpg"), row("b.mp4", num_vectors=None), row("b.mp4", segment=1, num_vectors=2))
    publish_refresh(
        files,
        reject("a.jpg", known_version="v0", known_vectors=1, modified="t1"),  # keeps its vector
        reject("c.jpg"),
        reject("d.txt", error_type=LEFT_OUT[0]),
    )
    found = assert_clean(files)
    assert (found.models[""].num_rejected, found.models[""].num_vectors) == (2, 3)


def test_a_run_at_work_is_told_and_is_no_error(tmp_path):
    files = new_store(tmp_path / "store")
    publish_refresh(files, row("a.jpg"))
    with write_lock(files):
        run, metadata = begin(files)
        write_part(files, metadata, 0, table(row("b.jpg"), row("c.jpg")))
        found = {each.place: each for each in check_store(StoreFiles(files.address)).findings}
        assert {each.severity for each in found.values()} == {"note"}
        assert set(found) == {".lock", f"runs/{run.run_id}"}
        assert f"process {os.getpid()} on" in found[".lock"].found
        assert found[f"runs/{run.run_id}"].found == "not finished, with 2 items in its journal"


def test_a_check_changes_no_file_and_makes_none(tmp_path):
    files = indexed_store(tmp_path / "store", 20)
    before = contents(files.address)
    folders = {path for path in (tmp_path / "store").rglob("*") if path.is_dir()}
    check_store(files, deep=True)
    assert contents(files.address) == before
    assert {path for path in (tmp_path / "store").rglob("*") if path.is_dir()} == folders


def test_what_is_published_while_it_looks_is_looked_at_again(tmp_path, monkeypatch):
    files = new_store(tmp_path / "store")
    publish_refresh(files, row("a.jpg"))
    check_rows, looks = check_module.check_rows, []

    def publishing(model, items, embeddings):
        looks.append(model.current.run_id)
        if len(looks) > 1:
            return check_rows(model, items, embeddings)
        publish_refresh(files, row("a.jpg", modified="t1"))
        return [Finding("error", "items", "a file was replaced under its eyes", "", "")]

    monkeypatch.setattr(check_module, "check_rows", publishing)
    found = check_store(files)
    assert (found.number("error"), len(looks)) == (0, 2)
    assert looks[0] < looks[1] == found.run_id


def test_before_anything_is_published_there_is_nothing_wrong(tmp_path):
    files = new_store(tmp_path / "store")
    (found,) = check_store(files).findings
    assert (found.severity, found.place, found.found) == ("note", "CURRENT.json", "nothing is published yet")


@pytest.mark.medium
def test_a_store_in_a_bucket_is_checked_as_one_on_a_disk(bucket):
    files = indexed_store(f"{bucket}/store", 20)
    assert_clean(files)
    with write_lock(files):
        (held,) = check_store(StoreFiles(files.address)).findings
        assert (held.severity, held.place) == ("note", ".lock")
        assert held.found.startswith(f"held by process {os.getpid()} on")
    path = RecordTable(files, "items", read_current(files).items).paths()[0]
    files.delete(f"items/{path}")
    found = [each for each in check_store(files).findings if each.severity == "error"]
    assert [(each.place, each.found) for each in found] == [(f"items/{path}", "missing")]
