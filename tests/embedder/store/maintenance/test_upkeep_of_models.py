"""Upkeep of a store with further models: compaction, vacuum, rollback, purge, migration and history are over all."""

from itertools import count

import pyarrow as pa
import pytest
from model_stores import add_model, drop_model, files_of, label_row, rejected_row, vector_row
from search_stores import ids, picture, searchable, towards
from store_states import Killed, dying, no_index

from embedder.errors import StoreError
from embedder.plugins.maintain.migrate import migrate
from embedder.plugins.maintain.purge.purge import purge
from embedder.plugins.maintain.vacuum import vacuum
from embedder.retrieval.store_api import open_store
from embedder.store.layout import Current, read_current, write_record
from embedder.store.lock import write_lock
from embedder.store.maintenance.compact import compact
from embedder.store.maintenance.rollback import rollback
from embedder.store.publish.current import parts_at
from embedder.store.publish.history import past_runs, publications, readable
from embedder.store.publish.publish import finish_publication
from embedder.store.publish.rejects import find_rejects, rejecting_model
from embedder.store.schema import TABLES
from embedder.store.store_info import read_store_info
from embedder.store.tables.models import model_files
from embedder.store.tables.tables import RecordTable
from embedder.store_index.keep_index import index_choice

NAMES = [f"{letter}.jpg" for letter in "abcdef"]
QUERY = towards(0)


@pytest.fixture
def files(tmp_path):
    """Six pictures; `clip` in six part files, of which one has a reject; `labels` of two of them."""
    store = searchable(tmp_path / "s", *(picture(name, 10 * n) for n, name in enumerate(NAMES)), index=False)
    for number, name in enumerate(NAMES):
        add_model(store.files, "clip", vector_row(name, towards(60 - 10 * number)))
    add_model(store.files, "clip", rejected_row("bad.jpg"))
    rows = [label_row(name) for name in NAMES[:2]]
    add_model(store.files, "labels", *rows, has_vectors=False, top=pa.array(["cat", "dog"]))
    return store.files


def state(files, version: Current | None = None) -> dict:
    """Rows of both tables of all models of a publication, without what names files and times."""
    version = version or read_current(files)
    found = {}
    for model, own in {"": version, **version.models}.items():
        for name in ("embeddings", "items"):
            rows = RecordTable(model_files(files, model), name, getattr(own, name)).read().to_pylist()
            found[model, name] = sorted(rows, key=lambda each: each["item_id"])
    return found


def test_compaction_merges_the_part_files_of_every_model_and_changes_no_row(files):
    before = state(files)
    with write_lock(files):
        new, tables = compact(files)
    figures = {(each.model, each.table): (each.num_files_before, each.num_files_after) for each in tables}
    assert figures["clip", "embeddings"] == (6, 1)
    assert figures["clip", "items"] == (7, 1)
    assert figures["labels", "embeddings"] == (1, 1)
    assert set(new.models) == {"clip", "labels"}
    assert state(files) == before
    assert parts_at(files, read_current(files))["clip"]["embeddings"][0].num_rows == 6
    assert ids(open_store(files.address, model="clip").search(QUERY, k=2)) == ["f.jpg", "e.jpg"]


def test_a_vacuum_after_that_deletes_the_small_files_and_no_row_that_is_published(files):
    with write_lock(files):
        compact(files)
        before = state(files)
        done = vacuum(files, keep_days=0.0, keep_versions=1)
    gone = [info.path for info in done.deleted if info.path.startswith("models/clip/embeddings/")]
    assert len(gone) == 6
    assert state(files) == before
    assert done.kept == (read_current(files).run_id,)
    assert not any(files.exists(path) for path in gone)


def test_a_vacuum_keeps_what_earlier_publications_need_of_each_model(files):
    history = publications(files)
    done = vacuum(files, keep_days=7.0)
    assert set(done.kept) == {record.run_id for record in history}
    assert [state(files, record) for record in history[-2:]][1] == state(files)


def test_of_a_model_that_no_kept_publication_has_a_vacuum_leaves_its_logs_and_its_record_alone(files):
    published = drop_model(files, "labels")
    _settle(files)
    vacuum(files)
    held = {info.path for info in files.list("models/labels")}
    assert {path.split("/")[2] for path in held if path.endswith(".parquet")} == set(TABLES), (
        "the publication before has it"
    )
    kept = vacuum(files, keep_days=0.0, keep_versions=1)
    left = {info.path for info in files.list("models/labels")}
    assert left == {"models/labels/store.json", *(path for path in held if "/_delta_log/" in path)}, (
        "names of a log are used once, so that it continues if there is a model of that name again"
    )
    assert [RecordTable(model_files(files, "labels"), name).paths() for name in TABLES] == [[], []]
    assert published.run_id in kept.kept
    assert readable(files, publications(files)) == set(kept.kept), "those with labels can't be read, and none says so"
    assert ids(open_store(files.address, model="clip").search(QUERY, k=1)) == ["f.jpg"]


@pytest.mark.medium
def test_a_vacuum_of_a_removed_model_that_is_killed_leaves_tables_that_a_run_can_go_on_with(files, monkeypatch):
    drop_model(files, "labels")
    view, expected = model_files(files, "labels"), state(files)
    for number in count():
        with dying(monkeypatch, number):
            try:
                _settle(files)
                vacuum(files, keep_days=0.0, keep_versions=1)
            except Killed:
                for name in TABLES:
                    RecordTable(view, name).read()
                assert state(files) == expected
                continue
        break
    assert number > 3, "so that the test can fail"
    assert not [info.path for info in view.list("") if info.path.endswith(".parquet")]
    version = RecordTable(view, "embeddings").version
    add_model(files, "labels", label_row("c.jpg"), has_vectors=False, top=pa.array(["cow"]))
    assert read_current(files).models["labels"].embeddings > version
    assert [each["item_id"] for each in state(files)["labels", "embeddings"]] == ["c.jpg"]


def _settle(files) -> None:
    """What every command that writes does first."""
    finish_publication(files)


def test_a_rollback_brings_the_rows_of_all_models_back_and_another_one_those_after_them(files):
    before, history = state(files), publications(files)
    target = history[2]
    with write_lock(files):
        back = rollback(files, target.run_id, index_choice(files))
    assert set(back.models) == {"clip"}
    assert state(files) == state(files, target)
    assert open_store(files.address, model="clip").to_arrow().num_rows == 2
    with write_lock(files):
        rollback(files, history[-1].run_id, index_choice(files))
    assert state(files) == before
    assert open_store(files.address).models == ("clip", "labels")


def test_a_rollback_whose_model_lost_a_file_is_refused(files):
    target = publications(files)[-2]
    part = parts_at(files, target)["clip"]["embeddings"][0]
    files.delete(f"models/clip/embeddings/{part.path}")
    with pytest.raises(StoreError, match="can't be read any more"), write_lock(files):
        rollback(files, target.run_id, no_index)


@pytest.mark.medium
def test_a_purged_item_leaves_every_model_and_version_and_nothing_names_it(files):
    bystanders = {key: [each for each in rows if each["item_id"] != "a.jpg"] for key, rows in state(files).items()}
    with write_lock(files):
        done = purge(files, ["a.jpg"], index_choice(files, reuse=False))
    assert (done.scan.found_in, done.unreadable) == ((), ())
    assert (done.plan.num_published, done.plan.num_vectors) == (1, 2)
    assert state(files) == bystanders
    assert not any(b"a.jpg" in content for path, content in files_of(files, but="-").items() if path != ".lock")
    for record in publications(files):
        assert all(each["item_id"] != "a.jpg" for rows in state(files, record).values() for each in rows)
    newest = publications(files)[-1]
    assert newest.model_counts["clip"] == {"num_items": 6, "num_vectors": 5, "num_pictures": 5, "num_rejected": 1}
    assert newest.model_counts["labels"]["num_vectors"] == 1


def test_pictures_of_a_model_are_counted_anew_in_each_version_that_a_purge_has_changed(files):
    with write_lock(files):
        purge(files, ["a.jpg"], no_index)
    counts = [record.model_counts["clip"] for record in publications(files) if "clip" in record.models]
    assert [each["num_pictures"] for each in counts] == [each["num_vectors"] for each in counts]


def test_an_item_of_a_further_model_alone_is_known_and_purged(files):
    with write_lock(files):
        done = purge(files, ["bad.jpg"], index_choice(files, reuse=False))
    assert done.published is not None
    assert find_rejects(model_files(files, "clip")).items.num_rows == 0
    with pytest.raises(StoreError, match="unknown"), write_lock(files):
        purge(files, ["never.jpg"], index_choice(files, reuse=False))


@pytest.mark.medium
def test_a_purge_that_is_killed_between_any_two_steps_ends_by_the_same_command(files, monkeypatch):
    expected = {key: [each for each in rows if each["item_id"] != "a.jpg"] for key, rows in state(files).items()}
    for number in count(0, 3):
        with dying(monkeypatch, number) as made:
            try:
                with write_lock(files):
                    done = purge(files, ["a.jpg"], index_choice(files, reuse=False))
            except Killed:
                state(files)  # what is published can be read
                continue
        break
    assert len(made) > 3 or number > 3
    assert done.scan.found_in == ()
    assert state(files) == expected


def test_history_counts_the_rows_of_each_model(files):
    last = past_runs(files)[-1].record
    assert last.model_counts == {
        "clip": {"num_items": 7, "num_vectors": 6, "num_pictures": 6, "num_rejected": 1},
        "labels": {"num_items": 2, "num_vectors": 2, "num_pictures": 0, "num_rejected": 0},
    }
    own = publications(model_files(files, "clip"))[-1]
    assert (own.run_id, own.num_vectors, own.models) == (last.run_id, 6, {})


def test_rejects_of_a_further_model_are_its_own(files):
    assert find_rejects(rejecting_model(files, "")).items.num_rows == 0
    found = find_rejects(rejecting_model(files, "clip")).items.to_pylist()
    assert [(each["item_id"], each["error_type"]) for each in found] == [("bad.jpg", "ModelFailed")]
    with pytest.raises(StoreError, match="no model 'clp' is published in it; it has main, clip, labels"):
        rejecting_model(files, "clp")


def test_migration_keeps_the_models(files):
    before = state(files)
    info = read_store_info(files)
    write_record(files, "store.json", info.model_copy(update={"format_version": 1}))
    with write_lock(files):
        was_older, new = migrate(files)
    assert was_older
    assert set(new.models) == {"clip", "labels"}
    assert state(files) == before
