"""Interim publications: readers see whole items during a run; in the end each row stands once."""

import random

import pyarrow as pa
import pytest
from store_samples import INFO, begin, reject, row, table
from store_states import (
    Killed,
    dying,
    finished_ids,
    no_index,
    publish_refresh,
    rows_now,
    state_now,
    vectors_now,
)
from work_on_disk import finished_items_in, in_memory_and_on_disk  # noqa: F401 - each test runs both ways

from embedder.errors import StoreError
from embedder.plugins.maintain.purge.purge import purge
from embedder.plugins.maintain.vacuum import vacuum
from embedder.store.files import StoreFiles
from embedder.store.journal.part_writer import write_part
from embedder.store.journal.runs import unfinished_runs
from embedder.store.layout import read_current, run_file
from embedder.store.lock import write_lock
from embedder.store.maintenance.rollback import rollback
from embedder.store.publish.history import one_before, past_runs, publications
from embedder.store.publish.interim import INTERIM_FILE, UnpublishedWork
from embedder.store.publish.publication import ModelWork
from embedder.store.publish.publish import InterimWork, PublishIntent, finish_publication, publish, publish_interim
from embedder.store.publish.rejects import find_rejects
from embedder.store.store_info import bind_store

INTENT = PublishIntent(kind="refresh", info=INFO)


class Session:
    """A session of the store's run, which writes its tasks by hand."""

    def __init__(self, files, in_work=()):
        finish_publication(files)
        self.run, self.metadata = begin(files)
        self.work = UnpublishedWork(self.run, pa.chunked_array([list(in_work)], pa.string()))
        self.num_tasks = 0

    def write(self, *rows):
        write_part(self.run.files, self.metadata, self.num_tasks, table(*rows))
        self.num_tasks += 1

    def publish_interim(self):
        batch = self.work.next()
        if not batch.whole.num_rows:
            return None
        record = publish_interim([InterimWork(self.run, batch, self.metadata, INTENT)])
        self.work.note_published(batch)
        return record

    def end(self, retired=()):
        return publish([ModelWork(self.run, self.metadata, INTENT, pa.chunked_array([list(retired)], pa.string()))])


def video(item_id, numbers, num_vectors=3, **changes):
    """Rows of a video; the last of `num_vectors` has its record."""
    return [
        row(item_id, segment=each, modality="video", num_vectors=num_vectors if each == num_vectors - 1 else None)
        | changes
        for each in numbers
    ]


def test_readers_see_what_is_finished_and_the_same_run_goes_on(files):
    session = Session(files)
    session.write(row("a.jpg"), reject("broken.jpg"))
    first = session.publish_interim()
    assert (first.num_items, first.num_vectors, first.num_rejected) == (2, 1, 1)
    assert first.run_id < session.run.run_id
    assert first.interim_of == session.run.run_id
    assert list(vectors_now(files)) == ["a.jpg"]
    session.write(row("b.jpg"))
    second = session.publish_interim()
    assert first.run_id < second.run_id < session.run.run_id
    assert session.publish_interim() is None, "nothing has been finished since"
    assert [run.run_id for run in unfinished_runs(files)] == [session.run.run_id]
    again = Session(files)
    assert again.run.run_id == session.run.run_id
    assert sorted(finished_ids(again.run)) == ["a.jpg", "b.jpg", "broken.jpg"]
    again.write(row("c.jpg"))
    last = again.end()
    assert [record.run_id for record in publications(files)] == [first.run_id, second.run_id, last.run_id]
    assert last.interim_of is None
    assert sorted(vectors_now(files)) == ["a.jpg", "b.jpg", "c.jpg"]
    assert unfinished_runs(files) == []


def test_a_video_whose_rows_are_not_all_there_waits_and_keeps_no_other_item_waiting(files):
    session = Session(files)
    session.write(row("a.jpg"), *video("u.mp4", [0, 1]))
    session.publish_interim()
    assert list(rows_now(files)) == [("a.jpg", 0)]
    session.write(*video("u.mp4", [2]), *video("v.mp4", [0]))
    session.publish_interim()
    assert sorted(rows_now(files)) == [("a.jpg", 0), *(("u.mp4", number) for number in range(3))]
    session.write(*video("v.mp4", [1, 2]))
    session.end()
    assert sorted(rows_now(files)) == [
        ("a.jpg", 0), *((name, number) for name in ("u.mp4", "v.mp4") for number in range(3))
    ]  # fmt: skip
    assert sorted(rows_now(files, "items")) == [("a.jpg", None), ("u.mp4", None), ("v.mp4", None)]


def test_what_an_earlier_session_did_of_an_item_in_work_waits_for_the_end(files):
    publish_refresh(files, row("a.jpg", content_version="v0"))
    Session(files).write(row("a.jpg", content_version="v1", image_embedding=[0.0, 1.0]), row("b.jpg"))
    session = Session(files, in_work=["a.jpg"])  # it has changed back
    session.publish_interim()
    assert vectors_now(files) == {"a.jpg": [1.0, 0.0], "b.jpg": [1.0, 0.0]}
    session.write(_unchanged("a.jpg", "v0"))
    session.publish_interim()
    session.end()
    assert vectors_now(files) == {"a.jpg": [1.0, 0.0], "b.jpg": [1.0, 0.0]}
    assert rows_now(files, "items")["a.jpg", None]["content_version"] == "v0"


def _unchanged(item_id, version):
    """Row of an item that was read, and whose published vector stays."""
    nothing = {"segment": None, "modality": None, "image_embedding": None, "num_vectors": 0}
    known = {"unchanged": True, "content_version": version, "known_version": version, "known_vectors": 1}
    return row(item_id, uri="/moved") | nothing | known


def test_rows_replaced_in_mid_run_are_not_brought_back_at_the_end(files):
    session = Session(files)
    session.write(row("a.jpg"), row("b.jpg"))
    first = session.publish_interim()
    later = Session(files, in_work=["a.jpg"])
    later.write(row("a.jpg", image_embedding=[0.0, 1.0]), row("c.jpg"))
    later.publish_interim()
    last = Session(files)
    last.write(row("d.jpg"))
    last.end()
    assert vectors_now(files) == {"a.jpg": [0.0, 1.0], "b.jpg": [1.0, 0.0], "c.jpg": [1.0, 0.0], "d.jpg": [1.0, 0.0]}
    rollback(files, first.run_id, no_index)
    assert vectors_now(files) == {"a.jpg": [1.0, 0.0], "b.jpg": [1.0, 0.0]}


def test_what_an_earlier_session_hands_in_late_replaces_nothing(files):
    first = Session(files)
    first.write(row("z.jpg"))
    second = Session(files, in_work=["a.jpg"])
    second.write(row("a.jpg", image_embedding=[0.0, 1.0]))
    second.publish_interim()
    third = Session(files)
    third.publish_interim()
    third.write(row("b.jpg"))
    first.write(row("a.jpg"))  # a node that was out of reach
    third.publish_interim()
    expected = {"a.jpg": [0.0, 1.0], "b.jpg": [1.0, 0.0], "z.jpg": [1.0, 0.0]}
    assert vectors_now(files) == expected
    third.end()
    assert vectors_now(files) == expected


def test_a_write_task_that_is_tried_again_after_its_publication_adds_nothing(files):
    session = Session(files)
    session.write(row("a.jpg"), row("b.jpg"))
    session.publish_interim()
    again = table(row("a.jpg", image_embedding=[0.0, 1.0]), row("b.jpg"))
    write_part(files, session.metadata, 0, again, attempt=1)
    assert vectors_now(files) == {"a.jpg": [1.0, 0.0], "b.jpg": [1.0, 0.0]}
    session.write(row("c.jpg"))
    session.publish_interim()
    session.end()
    assert vectors_now(files) == {key: [1.0, 0.0] for key in ["a.jpg", "b.jpg", "c.jpg"]}


@pytest.mark.medium
def test_interim_publications_in_a_bucket(bucket):
    files = StoreFiles(f"{bucket}/store")
    bind_store(files, INFO)
    with write_lock(files):
        session = Session(files)
        session.write(row("a.jpg"), *video("v.mp4", [0]))
        session.publish_interim()
        assert list(vectors_now(files)) == ["a.jpg"]
    with write_lock(files):
        again = Session(files)
        again.write(*video("v.mp4", [0, 1, 2]))
        again.publish_interim()
        again.end()
    assert sorted(rows_now(files)) == [("a.jpg", 0), *(("v.mp4", each) for each in range(3))]


def test_a_rollback_in_mid_run_goes_back_to_before_the_run_and_gives_up_the_rest(files):
    before = publish_refresh(files, row("z.jpg"))
    session = Session(files)
    session.write(row("a.jpg"))
    session.publish_interim()
    session.write(row("b.jpg"))
    interim = session.publish_interim()
    assert one_before(publications(files)).run_id == before.run_id
    record = rollback(files, None, no_index)
    assert (record.restores, record.interim_of, list(vectors_now(files))) == (before.run_id, None, ["z.jpg"])
    assert Session(files).run.run_id > record.run_id
    rollback(files, interim.run_id, no_index)
    assert sorted(vectors_now(files)) == ["a.jpg", "b.jpg", "z.jpg"]
    assert [run.started_at is not None for run in past_runs(files)] == [True] * 5


def test_a_rollback_from_a_whole_run_goes_back_to_before_its_first_interim_publication(files):
    before = publish_refresh(files, row("z.jpg"))
    session = Session(files)
    session.write(row("a.jpg"))
    session.publish_interim()
    session.end()
    assert one_before(publications(files)).run_id == before.run_id


def test_vacuum_in_mid_run_leaves_what_the_run_needs(files):
    session = Session(files)
    session.write(row("a.jpg"), *video("v.mp4", [0, 1]))
    session.publish_interim()
    session.write(*video("v.mp4", [2]))
    session.publish_interim()
    vacuum(files, keep_days=0, keep_versions=1)
    again = Session(files)
    again.write(row("b.jpg"))
    again.end()
    assert sorted(rows_now(files)) == [("a.jpg", 0), ("b.jpg", 0), *(("v.mp4", each) for each in range(3))]


def test_a_purge_in_mid_run_takes_the_item_from_every_publication(files):
    session = Session(files)
    session.write(row("a.jpg"), row("b.jpg"))
    session.publish_interim()
    session.write(row("c.jpg"))
    session.publish_interim()
    purge(files, ["a.jpg"], no_index)
    assert sorted(vectors_now(files)) == ["b.jpg", "c.jpg"]
    assert Session(files).run.run_id != session.run.run_id, "the rest is given up, as by any operation"


def test_a_purge_of_an_item_that_waits_leaves_the_run_resumable(files):
    session = Session(files)
    session.write(row("a.jpg"), *video("v.mp4", [0]))
    session.publish_interim()
    purge(files, ["v.mp4"], no_index)
    again = Session(files)
    assert again.run.run_id == session.run.run_id
    again.write(row("b.jpg"))
    again.publish_interim()
    again.end()
    assert sorted(rows_now(files)) == [("a.jpg", 0), ("b.jpg", 0)]


def test_rejects_of_a_run_that_goes_on(files):
    session = Session(files)
    session.write(reject("x.jpg"), row("a.jpg"))
    interim = session.publish_interim()
    found = find_rejects(files)
    assert (found.items["item_id"].to_pylist(), found.pending) == (["x.jpg"], None)
    assert find_rejects(files, interim.run_id).items["item_id"].to_pylist() == ["x.jpg"]
    session.write(reject("y.jpg"))
    assert find_rejects(files).pending.num_rejects == 1


def test_a_lost_record_is_refused_before_anything_is_doubled(files):
    session = Session(files)
    session.write(row("a.jpg"))
    interim = session.publish_interim()
    files.delete(run_file(interim.run_id, INTERIM_FILE))
    with pytest.raises(StoreError, match=r"interim.json: missing.*would publish rows twice"):
        session.end()


@pytest.mark.medium
@pytest.mark.parametrize("seed", range(6))
def test_any_sequence_of_sessions_kills_and_publications_ends_in_the_rows_of_the_last_sessions(
    files, monkeypatch, seed
):
    rng = random.Random(seed)
    expected = {}
    if rng.random() < 0.5:
        expected = {f"i{number}": 1 for number in range(0, 12, 3)}
        publish_refresh(files, *(row(name, image_embedding=[1.0, 0.0]) for name in expected))
    for session_number in range(2, 6):
        names = [f"i{number}" for number in rng.sample(range(12), 5)]
        session = Session(files, in_work=names)
        rows = [each for name in names for each in _rows(name, session_number)]
        end = rng.choice([len(rows), rng.randrange(len(rows))])
        tasks = sorted(rng.sample(range(1, len(rows)), 3))
        for start, stop in zip([0, *tasks], [*tasks, len(rows)], strict=True):
            if stop > end:
                break
            session.write(*rows[start:stop])
            done = {name for name in names if all(each in rows[:stop] for each in _rows(name, session_number))}
            expected |= dict.fromkeys(done, session_number)
            if rng.random() < 0.7:
                with dying(monkeypatch, rng.choice([99, rng.randrange(12)])):
                    try:
                        session.publish_interim()
                    except Killed:
                        break
            _check_whole(files)
    Session(files).end()
    _check_whole(files)
    assert {name: round(vector[0]) for name, vector in vectors_now(files).items()} == expected


def _rows(name, session_number):
    """Rows of an item as a session embeds it: an image or, of every third item, a video with a row more each time."""
    vector = {"image_embedding": [float(session_number), 0.0], "content_version": f"v{session_number}"}
    if int(name[1:]) % 3:
        return [row(name, **vector)]
    return video(name, range(session_number), session_number, **vector)


def _check_whole(files):
    """Each row stands once, and each item has all rows of one session."""
    if read_current(files) is None:
        return
    state = state_now(files)
    for (name, _), item in state["items"].items():
        rows = [each for (item_id, _), each in state["embeddings"].items() if item_id == name]
        assert len(rows) == item["num_vectors"], name
        assert {each["content_version"] for each in rows} == {item["content_version"]}, name
