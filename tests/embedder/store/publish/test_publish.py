"""The store's promise: readers see what was published, each item once, whatever was killed when."""

import subprocess
import sys
import threading
from contextlib import suppress
from itertools import count

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable
from store_samples import INFO, MODEL, PREPROCESSING, begin, publish_rows, reject, row, rows_of, table
from store_states import Killed, dying, finished_ids
from work_on_disk import finished_items_in, in_memory_and_on_disk  # noqa: F401 - each test runs both ways

from embedder.errors import StoreError
from embedder.retrieval.store_api import open_store
from embedder.store.files import StoreFiles
from embedder.store.journal.part_writer import RunMetadata, write_part
from embedder.store.journal.runs import finished_items, start_run
from embedder.store.layout import (
    CURRENT_FILE,
    PUBLISHED_FILE,
    Current,
    Published,
    read_current,
    read_record,
    run_file,
)
from embedder.store.lock import write_lock
from embedder.store.publish import publication
from embedder.store.publish.current import PROTOCOL_FIELDS
from embedder.store.publish.publication import ModelWork
from embedder.store.publish.publish import PublishIntent, finish_publication, publish
from embedder.store.store_info import bind_store, read_store_info
from embedder.store.tables.tables import RecordTable


@pytest.fixture
def files(tmp_path):
    return StoreFiles(tmp_path / "a store with ünicode")


def test_published_rows_are_read_back_with_their_values(files):
    run = publish_rows(
        files, row("a.jpg", caption="a cat", text_embedding=[0.0, 1.0], modality="pair"), reject("b.jpg")
    )
    (vector,) = rows_of(files)
    assert (vector["item_id"], vector["segment"], vector["modality"]) == ("a.jpg", 0, "pair")
    assert vector["image_embedding"] == [1.0, 0.0]
    assert vector["text_embedding"] == [0.0, 1.0]
    assert (vector["model_fingerprint"], vector["run_id"]) == (MODEL, run.run_id)
    embedded, rejected = rows_of(files, "items")
    assert (embedded["state"], embedded["error"]) == ("embedded", None)
    assert (rejected["state"], rejected["step"], rejected["error_type"]) == ("rejected", "decode", "Broken")
    assert read_current(files).run_id == run.run_id


def test_a_killed_run_is_continued_under_its_own_id(files):
    first, metadata = begin(files)
    write_part(files, metadata, 0, table(row("a.jpg")))
    second, metadata = begin(files)
    assert second.run_id == first.run_id
    assert second.session > first.session
    assert finished_ids(second) == ["a.jpg"]
    write_part(files, metadata, 0, table(row("b.jpg")))
    publish([ModelWork(second, metadata)])
    assert [each["item_id"] for each in rows_of(files)] == ["a.jpg", "b.jpg"]
    third, _ = begin(files)
    assert third.run_id > first.run_id


def test_a_video_cut_off_between_two_parts_is_done_again_and_counted_once(files):
    _, metadata = begin(files)
    opening = [row("v.mp4", segment=number, modality="video", num_vectors=None) for number in (0, 1)]
    write_part(files, metadata, 0, table(*opening, row("a.jpg")))
    run, metadata = begin(files)
    assert finished_ids(run) == ["a.jpg"]
    again = [
        row("v.mp4", segment=number, modality="video", num_vectors=3 if number == 2 else None) for number in range(3)
    ]
    write_part(files, metadata, 0, table(*again))
    publish([ModelWork(run, metadata)])
    assert [(each["item_id"], each["segment"]) for each in rows_of(files)] == [
        ("a.jpg", 0),
        ("v.mp4", 0),
        ("v.mp4", 1),
        ("v.mp4", 2),
    ]
    assert [each["item_id"] for each in rows_of(files, "items")] == ["a.jpg", "v.mp4"]


def test_a_record_whose_segments_are_missing_does_not_count_as_finished(files):
    _, metadata = begin(files)
    write_part(files, metadata, 0, table(row("v.mp4", segment=2, modality="video", num_vectors=3)))
    run, _ = begin(files)
    assert finished_items(run).num_rows == 0


def test_an_item_done_in_two_sessions_keeps_the_later_vectors(files):
    _, metadata = begin(files)
    write_part(files, metadata, 0, table(row("a.jpg"), row("b.jpg")))
    run, metadata = begin(files)
    write_part(files, metadata, 0, table(row("a.jpg", image_embedding=[0.0, 1.0], modified="t1")))
    publish([ModelWork(run, metadata)])
    assert [each["image_embedding"] for each in rows_of(files)] == [[0.0, 1.0], [1.0, 0.0]]
    assert [each["modified"] for each in rows_of(files, "items")] == ["t1", "t0"]


def test_a_write_task_tried_twice_leaves_its_rows_once(files):
    run, metadata = begin(files)
    for _ in range(2):
        write_part(files, metadata, 7, table(row("a.jpg")))
    publish([ModelWork(run, metadata)])
    assert len(rows_of(files)) == 1


def test_each_publication_leaves_a_record_of_what_it_came_to(files):
    first = publish_rows(files, row("a.jpg"), row("b.jpg"), reject("c.jpg"))
    second = publish_rows(files, reject("b.jpg", known_vectors=1, known_version="v0"))
    records = [read_record(files, run_file(run.run_id, PUBLISHED_FILE), Published) for run in (first, second)]
    assert [(each.kind, each.num_items, each.num_vectors, each.num_rejected) for each in records] == [
        ("embed", 3, 2, 1),
        ("embed", 3, 2, 2),
    ]
    state = set(Current.model_fields) - set(PROTOCOL_FIELDS)
    assert records[1].model_dump(include=state) == read_current(files).model_dump(include=state)
    assert records[1].model_dump(include=set(PROTOCOL_FIELDS)) == {"deleting": (), "last_index": {}, "fence": None}


def test_a_changed_file_that_can_not_be_read_is_stale_and_keeps_all_that_is_known_of_its_vectors(files):
    publish_rows(files, row("a.jpg"), row("b.jpg"))
    publish_rows(files, reject("a.jpg", known_vectors=1, known_version="v0", content_version="broken", size_bytes=3))
    stale, other = rows_of(files, "items")
    assert (stale["state"], stale["stale"], stale["num_vectors"], stale["content_version"]) == (
        "rejected",
        True,
        1,
        "v0",
    )
    assert (stale["size_bytes"], stale["error_type"]) == (3, "Broken")
    assert (other["state"], other["stale"]) == ("embedded", False)
    assert [each["image_embedding"] for each in rows_of(files)] == [[1.0, 0.0], [1.0, 0.0]]


def test_a_half_read_file_does_not_replace_the_whole_vectors_of_before(files):
    publish_rows(files, row("v.mp4", num_vectors=2) | {"num_vectors": None}, row("v.mp4", segment=1, num_vectors=2))
    publish_rows(
        files,
        row("v.mp4", image_embedding=[0.0, 1.0], error_type="Broken", known_vectors=2, known_version="v0"),
    )
    assert [(each["segment"], each["image_embedding"]) for each in rows_of(files)] == [(0, [1.0, 0.0]), (1, [1.0, 0.0])]
    assert [(each["stale"], each["num_vectors"]) for each in rows_of(files, "items")] == [(True, 2)]


def test_an_equal_file_has_its_record_renewed_and_its_vectors_left_alone(files):
    first = publish_rows(files, row("a.jpg"), row("b.jpg"))
    before = RecordTable(files, "embeddings").version
    equal = reject("a.jpg", modified="t9", unchanged=True, known_vectors=1, known_version="v0") | dict.fromkeys(
        ("step", "error_type", "error", "transient")
    )
    publish_rows(files, equal)
    assert RecordTable(files, "embeddings").version == before
    assert {each["run_id"] for each in rows_of(files)} == {first.run_id}
    touched, _ = rows_of(files, "items")
    assert (touched["modified"], touched["state"], touched["stale"], touched["num_vectors"]) == (
        "t9",
        "embedded",
        False,
        1,
    )


def test_retired_items_leave_both_tables_and_nothing_else_does(files):
    publish_rows(files, row("a.jpg"), row("b.jpg"), reject("c.jpg"))
    run, metadata = begin(files)
    write_part(files, metadata, 0, table(row("d.jpg"), row("e.jpg")))
    publish([ModelWork(run, metadata, retired=pa.chunked_array([["b.jpg", "c.jpg", "e.jpg"]]))])
    assert [each["item_id"] for each in rows_of(files)] == ["a.jpg", "d.jpg"]
    assert [each["item_id"] for each in rows_of(files, "items")] == ["a.jpg", "d.jpg"]


def test_nothing_of_another_model_stays(files):
    publish_rows(files, row("a.jpg"), row("b.jpg"))
    run, metadata = begin(files)
    write_part(files, metadata, 0, table(row("a.jpg", image_embedding=[0.0, 1.0])))
    info = INFO.model_copy(update={"model": "new", "model_fingerprint": "two"})
    bind_store(files, INFO)
    publish([ModelWork(run, metadata, PublishIntent(kind="refresh", info=info, replaces_all=True))])
    assert [(each["item_id"], each["image_embedding"]) for each in rows_of(files)] == [("a.jpg", [0.0, 1.0])]
    assert [each["item_id"] for each in rows_of(files, "items")] == ["a.jpg"]
    assert read_current(files).model_fingerprint == read_store_info(files).model_fingerprint == "two"


@pytest.mark.parametrize("fatal", ["embeddings", "items"])
def test_a_publication_cut_off_between_its_commits_is_finished_as_it_was_decided(files, monkeypatch, fatal):
    publish_rows(files, row("a.jpg"), row("b.jpg"))
    run, metadata = begin(files)
    write_part(files, metadata, 0, table(row("c.jpg")))
    commit = RecordTable.commit_files

    def dying_commit(self, *arguments):
        version = commit(self, *arguments)
        if self.name == fatal:
            raise Killed
        return version

    with monkeypatch.context() as patch:
        patch.setattr(RecordTable, "commit_files", dying_commit)
        with pytest.raises(Killed):
            publish([ModelWork(run, metadata, retired=pa.chunked_array([["b.jpg"]]))])
    _, later = begin(files)
    write_part(files, later, 0, table(row("d.jpg")))  # work of a later session must not mix in
    assert finish_publication(files).run_id == run.run_id
    assert finish_publication(files) is None
    for name in ("embeddings", "items"):
        assert [each["item_id"] for each in rows_of(files, name)] == ["a.jpg", "c.jpg"]


@pytest.mark.medium
def test_part_files_are_rewritten_side_by_side_and_each_keeps_its_other_rows(files, monkeypatch):
    for number in range(4):
        publish_rows(files, row(f"{number}/changes.jpg"), row(f"{number}/stays.jpg"))
    at_once = threading.Barrier(2, timeout=60)  # of whose two sides none continues without the other
    rewrite = publication._rewrite
    monkeypatch.setattr(publication, "_rewrite", lambda *arguments: (at_once.wait(), rewrite(*arguments))[1])
    publish_rows(files, *(row(f"{number}/changes.jpg", modified="later") for number in range(4)))
    items = {each["item_id"]: each["modified"] for each in rows_of(files, "items")}
    assert items == {
        f"{number}/{name}.jpg": "later" if name == "changes" else row("x.jpg")["modified"]
        for number in range(4)
        for name in ("changes", "stays")
    }
    assert len(rows_of(files)) == 8


def test_a_part_file_that_can_not_be_rewritten_leaves_what_was_published(files, monkeypatch):
    publish_rows(files, row("a.jpg"), row("b.jpg"))
    publish_rows(files, row("c.jpg"), row("d.jpg"))
    before, current = rows_of(files), read_current(files)
    rewrite = publication._rewrite

    def full(work, table, path, content):
        if "c.jpg" in content["item_id"].to_pylist():
            raise StoreError("the disk is full")
        return rewrite(work, table, path, content)

    monkeypatch.setattr(publication, "_rewrite", full)
    with pytest.raises(StoreError, match="the disk is full"):
        publish_rows(files, row("b.jpg", modified="later"), row("d.jpg", modified="later"))
    assert (rows_of(files), read_current(files)) == (before, current)


@pytest.mark.medium
def test_paths_do_not_grow_with_every_run(files):
    publish_rows(files, row("a.jpg"), row("b.jpg"))
    for number in range(4):
        publish_rows(files, row("b.jpg", modified=f"t{number}"))
    lengths = {len(path) for path in RecordTable(files, "embeddings").paths()}
    assert max(lengths) < 70
    assert len(rows_of(files)) == 2


def test_a_run_killed_while_its_index_is_built_ends_in_the_same_store(files):
    run, metadata = about_to_publish(files)
    published = read_current(files)

    def dying_build(view, version, info):
        raise Killed

    with pytest.raises(Killed):
        publish([ModelWork(run, metadata)], dying_build)
    assert read_current(files) == published, "readers continue with the old state"
    check_that_it_ends(files, run.run_id)


@pytest.mark.medium
def test_a_run_killed_before_any_write_of_publishing_ends_in_the_same_store(tmp_path, monkeypatch):
    for number in count():
        files = StoreFiles(tmp_path / str(number))
        run, metadata = about_to_publish(files)
        published, rows = read_current(files), rows_of(files)
        with dying(monkeypatch, number) as made, suppress(Killed):
            publish([ModelWork(run, metadata)])
        is_published = read_current(files) != published
        assert is_published == (f"put {CURRENT_FILE}" in made), "by one write, before which readers see the old state"
        if not is_published:
            own = RecordTable(files, "embeddings", published.embeddings).read(["item_id"])
            assert own.num_rows == len(rows)
            check_that_it_ends(files, run.run_id)
        finish_publication(files)
        check_rows(files)
        if len(made) < number:  # nothing was left to kill
            break
    assert number > 8, "the intent, part files, two commits, the record, the swap, store.json, what is deleted"


def about_to_publish(files):
    publish_rows(files, row("a.jpg"), row("b.jpg"))
    run, metadata = begin(files)
    write_part(files, metadata, 0, table(row("b.jpg", image_embedding=[0.0, 1.0]), row("c.jpg")))
    return run, metadata


def check_that_it_ends(files, run_id):
    """What the next session publishes is the same run, and whole."""
    again, metadata = begin(files)
    assert again.run_id == run_id
    publish([ModelWork(again, metadata)])
    check_rows(files)
    assert read_current(files).embeddings == RecordTable(files, "embeddings").version


def check_rows(files):
    assert [(each["item_id"], each["image_embedding"]) for each in rows_of(files)] == [
        ("a.jpg", [1.0, 0.0]),
        ("b.jpg", [0.0, 1.0]),
        ("c.jpg", [1.0, 0.0]),
    ]
    assert [each["item_id"] for each in rows_of(files, "items")] == ["a.jpg", "b.jpg", "c.jpg"]


@pytest.mark.medium
def test_a_change_of_the_model_killed_before_any_write_of_publishing_serves_one_model(tmp_path, monkeypatch):
    for number in count():
        files = StoreFiles(tmp_path / str(number))
        bind_store(files, INFO)
        publish_rows(files, row("a.jpg"), row("b.jpg"))
        work = work_of_another_model(files)
        with dying(monkeypatch, number) as made, suppress(Killed):
            publish([work])
        served = open_store(files.address)
        assert {each["model_fingerprint"] for each in served.to_arrow().to_pylist()} == {served.info.model_fingerprint}
        finish_publication(files)
        publish([work_of_another_model(files)])
        assert [(each["item_id"], each["image_embedding"]) for each in rows_of(files)] == [("a.jpg", [0.0, 1.0])]
        assert open_store(files.address).info.model == read_store_info(files).model == "new"
        assert read_current(files).embeddings == RecordTable(files, "embeddings").version
        if len(made) < number:
            break
    assert number > 7, "the intent, two commits, the record, the swap, store.json, the run"


def work_of_another_model(files):
    info = INFO.model_copy(update={"model": "new", "model_fingerprint": "two"})
    bind_store(files, info, may_change=True)
    run = start_run(files, info, pa.schema([]))
    metadata = RunMetadata(run.run_id, run.session, "two", PREPROCESSING, pa.schema([]))
    write_part(files, metadata, 0, table(row("a.jpg", image_embedding=[0.0, 1.0])))
    return ModelWork(run, metadata, PublishIntent(kind="refresh", info=info, replaces_all=True))


def test_parts_of_cut_off_tasks_are_swept_when_the_run_is_published(files):
    run, metadata = begin(files)
    write_part(files, metadata, 0, table(row("a.jpg")))
    orphan = f"embeddings/part-{run.run_id}-{run.session}-000099.parquet"
    files.write(orphan, b"half a file")
    publish([ModelWork(run, metadata)])
    assert not files.exists(orphan)
    assert len(rows_of(files)) == 1


def test_vectors_that_are_not_finite_become_rejects_of_the_step_embed(files):
    run, metadata = begin(files)
    bad = row("bad.jpg", image_embedding=[float("nan"), 0.0])
    write_part(files, metadata, 0, table(row("good.jpg"), bad))
    publish([ModelWork(run, metadata)])
    assert {each["item_id"]: each["image_embedding"] for each in rows_of(files)} == {
        "bad.jpg": None,
        "good.jpg": [1.0, 0.0],
    }
    items = {each["item_id"]: (each["state"], each["step"]) for each in rows_of(files, "items")}
    assert items == {"bad.jpg": ("rejected", "embed"), "good.jpg": ("embedded", None)}


@pytest.mark.medium
def test_a_second_writer_is_refused_and_told_who_holds_the_store(files):
    program = "import sys; from embedder.store.files import StoreFiles; from embedder.store.lock import write_lock\n"
    program += "with write_lock(StoreFiles(sys.argv[1])): print('held')"
    attempt = [sys.executable, "-c", program, files.address]
    with write_lock(files):
        refused = subprocess.run(attempt, capture_output=True, text=True, check=False)
    allowed = subprocess.run(attempt, capture_output=True, text=True, check=False)
    assert "another run is writing to it" in refused.stderr
    assert allowed.stdout == "held\n"


def test_a_missing_part_file_is_named(files):
    publish_rows(files, row("a.jpg"))
    (path,) = RecordTable(files, "embeddings").paths()
    files.delete(f"embeddings/{path}")
    with pytest.raises(StoreError, match="part file"):
        RecordTable(files, "embeddings").read()


def test_ids_of_a_part_stand_in_the_log_so_that_readers_can_skip_files(files):
    publish_rows(files, row("b"), row("a"))
    stats = pa.table(DeltaTable(files.uri("embeddings")).get_add_actions(flatten=True))
    assert stats["min.item_id"].to_pylist() == ["a"]
    assert stats["max.item_id"].to_pylist() == ["b"]
    assert pc.sum(stats["num_records"]).as_py() == 2
    assert rows_of(files)[0]["preprocess_fingerprint"] == PREPROCESSING
