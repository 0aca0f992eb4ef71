"""Interim publications of a run of two models: both become visible together, and each row of each stands once."""

import random
from contextlib import suppress
from itertools import count

import pytest
from model_runs import table_hashes
from store_samples import reject, row
from store_states import Killed, dying, finished_ids, new_store, no_index, rows_now, state_now
from two_models import TwoModels, view_of

from embedder.plugins.maintain.vacuum import vacuum
from embedder.store.journal.runs import unfinished_runs
from embedder.store.layout import read_current
from embedder.store.maintenance.rollback import rollback
from embedder.store.publish.history import publications, readable
from embedder.store.publish.publish import (
    finish_publication,
)
from embedder.store.publish.rejects import find_rejects


def states(files) -> tuple:
    """What readers see of both models; None of one that is not published."""
    current = read_current(files)
    has_tags = current is not None and "tags" in current.models
    return (state_now(files) if current else None, state_now(view_of(files)) if has_tags else None)


def keys(files) -> tuple[list, list]:
    return sorted(rows_now(files)), sorted(rows_now(view_of(files)))


def video(item_id, numbers):
    """Rows of a video of three; the last has its record."""
    return [row(item_id, segment=each, modality="video", num_vectors=3 if each == 2 else None) for each in numbers]


def test_rows_of_both_models_are_seen_while_the_run_goes_on_and_once_in_the_end(files):
    session = TwoModels(files)
    session.write(row("a.jpg"), row("b.jpg"), tags=[row("a.jpg"), reject("b.jpg", step="model tags")])
    first = session.publish_interim()
    assert keys(files) == ([("a.jpg", 0), ("b.jpg", 0)], [("a.jpg", 0)])
    assert first.model_counts["tags"] == {"num_items": 2, "num_vectors": 1, "num_pictures": 1, "num_rejected": 1}
    assert find_rejects(view_of(files)).items["item_id"].to_pylist() == ["b.jpg"]
    session.write(row("c.jpg"))
    second = session.publish_interim()
    assert session.publish_interim() is None, "nothing has been finished since"
    again = TwoModels(files)
    assert again.run.run_id == session.run.run_id
    assert sorted(finished_ids(again.own)) == ["a.jpg", "b.jpg", "c.jpg"]
    again.write(row("d.jpg"))
    last = again.end()
    everything = [(f"{name}.jpg", 0) for name in "abcd"]
    assert keys(files) == (everything, [each for each in everything if each[0] != "b.jpg"])
    history = publications(files)
    assert [record.run_id for record in history] == [first.run_id, second.run_id, last.run_id]
    assert readable(files, history) == {record.run_id for record in history}
    assert unfinished_runs(files) == []


def test_an_item_comes_with_all_its_models(files):
    session = TwoModels(files)
    session.write(row("a.jpg"))
    session.write_tags(row("b.jpg"))  # the main model's part of the task is not written yet
    session.publish_interim()
    assert keys(files) == ([("a.jpg", 0)], [("a.jpg", 0)])
    session.write_main(row("b.jpg"))
    session.publish_interim()
    assert keys(files) == ([("a.jpg", 0), ("b.jpg", 0)],) * 2


def test_an_added_model_is_published_as_it_goes_and_the_main_models_files_stay(files):
    session = TwoModels(files)
    session.write(row("a.jpg"), row("b.jpg"), tags=[row("a.jpg")])
    session.end()
    before = table_hashes(files.address)
    added = TwoModels(files, of_tags=["b.jpg", "c.jpg"])
    added.write(tags=[row("b.jpg")])
    assert added.publish_interim().num_items == 2
    assert keys(files)[1] == [("a.jpg", 0), ("b.jpg", 0)]
    added.write(tags=[row("c.jpg")])
    added.end()
    assert keys(files)[1] == [("a.jpg", 0), ("b.jpg", 0), ("c.jpg", 0)]
    assert table_hashes(files.address) == before


def test_a_video_waits_in_the_model_that_lacks_rows_of_it(files):
    session = TwoModels(files)
    session.write(*video("v.mp4", [0, 1, 2]), tags=video("v.mp4", [0, 1]))
    session.publish_interim()
    assert "tags" not in read_current(files).models
    session.write(tags=video("v.mp4", [2]))
    session.publish_interim()
    assert keys(files) == ([("v.mp4", number) for number in range(3)],) * 2
    session.end()
    assert keys(files) == ([("v.mp4", number) for number in range(3)],) * 2


def test_vacuum_and_rollback_in_mid_run_keep_both_models_whole(files):
    session = TwoModels(files)
    session.write(row("a.jpg"), *video("v.mp4", [0, 1]))
    first = session.publish_interim()
    session.write(*video("v.mp4", [2]))
    session.publish_interim()
    vacuum(files, keep_days=0, keep_versions=2)
    again = TwoModels(files)
    again.write(row("b.jpg"))
    again.end()
    assert keys(files) == ([("a.jpg", 0), ("b.jpg", 0), *(("v.mp4", number) for number in range(3))],) * 2
    rollback(files, first.run_id, no_index)
    assert keys(files) == ([("a.jpg", 0)],) * 2
    assert read_current(files).models["tags"].interim_of is None


@pytest.mark.medium
@pytest.mark.parametrize("has_base", [False, True])
def test_an_interim_publication_killed_at_any_change_shows_both_models_or_neither(monkeypatch, tmp_path, has_base):
    for number in count(0, 1 if has_base else 3):
        files = new_store(tmp_path / f"store {number}")
        if has_base:
            base = TwoModels(files)
            base.write(row("a.jpg"), row("z.jpg"))
            base.end()
        before = states(files)
        session = TwoModels(files)
        session.write(row("a.jpg", image_embedding=[0.0, 1.0]), row("b.jpg"), *video("v.mp4", [0, 1]))
        with dying(monkeypatch, number) as made:
            try:
                session.publish_interim()
            except Killed:
                main, tags = states(files)
                assert (main, tags) == before or (main.keys() == tags.keys() and ("b.jpg", 0) in rows_now(files))
                assert not (has_base or main) or keys(files)[0] == keys(files)[1]
        again = TwoModels(files)
        assert again.run.run_id == session.run.run_id
        again.write(*video("v.mp4", [0, 1, 2]), row("c.jpg"))
        again.publish_interim()
        again.end()
        expected = [("a.jpg", 0), ("b.jpg", 0), ("c.jpg", 0), *(("v.mp4", each) for each in range(3))]
        assert keys(files) == (sorted([*expected, *([("z.jpg", 0)] if has_base else [])]),) * 2
        for each in (files, view_of(files)):
            assert rows_now(each)["a.jpg", 0]["image_embedding"] == [0.0, 1.0]
        if len(made) < number:  # nothing was left to kill
            break
    assert number > 8


@pytest.mark.medium
def test_an_added_model_whose_publications_are_killed_at_any_change_has_each_row_once(monkeypatch, tmp_path):
    for number in count():
        files = new_store(tmp_path / f"store {number}")
        base = TwoModels(files)
        base.write(row("a.jpg"), row("b.jpg"), tags=[row("a.jpg")])
        base.end()
        before = table_hashes(files.address)
        session = TwoModels(files)
        session.write(tags=[row("b.jpg"), *video("v.mp4", [0, 1])])
        with dying(monkeypatch, number) as made, suppress(Killed):
            session.publish_interim()
        assert keys(files)[1] in ([("a.jpg", 0)], [("a.jpg", 0), ("b.jpg", 0)])
        again = TwoModels(files)
        again.write(tags=[row("c.jpg")])
        again.publish_interim()
        assert keys(files)[1] == [("a.jpg", 0), ("b.jpg", 0), ("c.jpg", 0)]
        again.write(tags=video("v.mp4", [0, 1, 2]))
        again.end()
        expected = [("a.jpg", 0), ("b.jpg", 0), ("c.jpg", 0), *(("v.mp4", each) for each in range(3))]
        assert keys(files)[1] == expected
        assert table_hashes(files.address) == before
        if len(made) < number:  # nothing was left to kill
            break
    assert number > 5


@pytest.mark.medium
def test_the_last_publication_killed_at_any_change_is_brought_to_its_end(monkeypatch, tmp_path):
    for number in count():
        files = new_store(tmp_path / f"store {number}")
        session = TwoModels(files)
        session.write(row("a.jpg"), *video("v.mp4", [0]))
        session.publish_interim()
        session.write(*video("v.mp4", [1, 2]), row("b.jpg"))
        with dying(monkeypatch, number) as made, suppress(Killed):
            session.end()
        finish_publication(files)
        if unfinished_runs(files):
            TwoModels(files).end()
        assert keys(files) == ([("a.jpg", 0), ("b.jpg", 0), *(("v.mp4", each) for each in range(3))],) * 2
        if len(made) < number:  # nothing was left to kill
            break
    assert number > 8


@pytest.mark.medium
@pytest.mark.parametrize("seed", range(8))
def test_any_sequence_of_sessions_kills_and_publications_ends_in_the_rows_of_the_last_sessions(
    files, monkeypatch, seed
):
    rng = random.Random(seed)
    expected: list[dict] = [{}, {}]
    for session_number in range(2, 6):
        names = [f"i{number}" for number in rng.sample(range(10), 4)]
        of_tags = [name for name in names if rng.random() < 0.7]
        session = TwoModels(files, in_work=names, of_tags=of_tags)
        for name in names:
            vector = [1.0, float(session_number)]
            session.write_tags(*([row(name, image_embedding=vector)] if name in of_tags else []))
            if name in of_tags:
                expected[1][name] = vector
            if rng.random() < 0.1:
                break  # the process ended between the two
            session.write_main(row(name, image_embedding=vector))
            expected[0][name] = vector
            if rng.random() < 0.6:
                with dying(monkeypatch, rng.choice([99, rng.randrange(18)])):
                    try:
                        session.publish_interim()
                    except Killed:
                        break
    TwoModels(files).end()
    for view, rows in zip((files, view_of(files)), expected, strict=True):
        assert {item: each["image_embedding"] for (item, _), each in rows_now(view).items()} == rows
