"""Going back publishes the old rows again, and what follows builds on them."""

from contextlib import suppress
from itertools import count

import numpy as np
import pytest
from store_samples import INFO, begin, row, table
from store_states import (
    Killed,
    build_store_index,
    dying,
    new_store,
    no_index,
    publish_refresh,
    rows_now,
    state_now,
)

from embedder.errors import StoreError
from embedder.retrieval.store_api import open_store
from embedder.store.journal.part_writer import write_part
from embedder.store.layout import STORE_FILE, read_current, write_record
from embedder.store.maintenance.rollback import rollback
from embedder.store.publish.history import publications
from embedder.store.publish.publish import finish_publication
from embedder.store.store_info import read_store_info
from embedder.store.tables.tables import RecordTable
from embedder.store_index.keep_index import index_choice

UP = [0.0, 1.0]


@pytest.fixture
def two_nights(files):
    publish_refresh(files, row("a.jpg"), row("b.jpg"))
    before = state_now(files)
    publish_refresh(files, row("b.jpg", image_embedding=UP, modified="t1"), row("c.jpg"))
    return before


def test_rows_are_those_of_then_and_versions_go_on_counting(files, two_nights):
    current = read_current(files)
    rollback(files, None, no_index)
    assert state_now(files) == two_nights
    assert read_current(files).embeddings == current.embeddings + 1
    assert RecordTable(files, "items").version == read_current(files).items, "other readers see the same"


def test_a_rollback_to_what_is_published_is_refused(files, two_nights):
    with pytest.raises(StoreError, match="is what is published now"):
        rollback(files, read_current(files).run_id, no_index)


def test_there_is_nothing_before_the_first_publication(files):
    publish_refresh(files, row("a.jpg"))
    with pytest.raises(StoreError, match="nothing was published before"):
        rollback(files, None, no_index)


def test_an_unfinished_run_is_given_up_and_named(files, two_nights, said):
    run, metadata = begin(files)
    write_part(files, metadata, 0, table(row("z.jpg")))
    rollback(files, None, no_index)
    assert [run.run_id in message for message in said] == [True]
    later, _ = begin(files)
    assert later.run_id > read_current(files).run_id, "a new run, not the one given up"


def test_the_index_of_then_is_taken_again(files, two_nights):
    first = publications(files)[0]
    rollback(files, first.run_id, no_index)
    number, _ = build_store_index(files)
    with_index = read_current(files).run_id
    publish_refresh(files, row("e.jpg"))
    rollback(files, with_index, index_choice(files))
    assert read_current(files).index == number


def test_an_index_that_is_gone_is_built_anew_where_the_store_has_one(files, two_nights):
    rollback(files, None, no_index)
    number, _ = build_store_index(files)
    with_index = read_current(files).run_id
    rollback(files, publications(files)[1].run_id, index_choice(files))
    rebuilt = read_current(files).index
    assert rebuilt > number
    for info in list(files.list(f"index/{number:06d}")):
        files.delete(info.path)
    rollback(files, with_index, index_choice(files))
    hits = open_store(files.address).search(np.array([1.0, 0.0], np.float32), 10)
    assert sorted(hit.item_id for hit in hits) == ["a.jpg", "b.jpg"]
    assert read_current(files).index > rebuilt


def test_an_old_model_is_served_again(files):
    publish_refresh(files, row("a.jpg"))
    first = read_current(files)
    newer = first.model_copy(update={"model": "m2", "model_fingerprint": "two"})
    publish_refresh(files, row("b.jpg"))
    # As a refresh with another model leaves it.
    current = read_current(files).model_copy(update={"model": newer.model, "model_fingerprint": "two"})
    write_record(files, "CURRENT.json", current)
    write_record(files, STORE_FILE, INFO.model_copy(update={"model": "m2", "model_fingerprint": "two"}))
    rollback(files, first.run_id, no_index)
    assert (read_current(files).model, read_current(files).model_fingerprint) == (INFO.model, INFO.model_fingerprint)
    assert read_store_info(files).model_fingerprint == INFO.model_fingerprint
    assert open_store(files.address).info.model == INFO.model


@pytest.mark.medium
def test_killed_between_any_two_steps_it_leaves_one_whole_state_and_ends_when_done_again(tmp_path, monkeypatch):
    for number in count():
        files = new_store(tmp_path / str(number))
        publish_refresh(files, row("a.jpg"), row("b.jpg"))
        before = state_now(files)
        target = read_current(files).run_id
        publish_refresh(files, row("b.jpg", image_embedding=UP, modified="t1"), row("c.jpg"))
        after = state_now(files)
        with dying(monkeypatch, number) as made, suppress(Killed):
            rollback(files, target, no_index)
        assert state_now(files) in (before, after)
        if state_now(files) == after:
            rollback(files, target, no_index)
        assert state_now(files) == before
        if len(made) < number:
            break
    assert len(made) >= 5, "two commits, the record, the swap, the run"


def test_a_rollback_that_died_half_way_does_not_leak_into_the_next_run(files, two_nights, monkeypatch):
    after = rows_now(files)
    with dying(monkeypatch, 2) as made, pytest.raises(Killed):
        rollback(files, None, no_index)
    assert [each.partition("/")[0] for each in made] == ["put runs", "put items"], "its record and one commit"
    publish_refresh(files, row("d.jpg"))
    assert rows_now(files).keys() == {*after, ("d.jpg", 0)}
    assert {key for key, _ in rows_now(files, "items")} == {"a.jpg", "b.jpg", "c.jpg", "d.jpg"}


def test_other_readers_see_what_is_published_again_as_soon_as_somebody_writes(files, two_nights, monkeypatch):
    with dying(monkeypatch, 2), pytest.raises(Killed):
        rollback(files, None, no_index)
    assert RecordTable(files, "items").paths() != RecordTable(files, "items", read_current(files).items).paths()
    for _ in range(2):
        finish_publication(files)
        assert RecordTable(files, "items").paths() == RecordTable(files, "items", read_current(files).items).paths()
    assert RecordTable(files, "items").version == read_current(files).items + 2
