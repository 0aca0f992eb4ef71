"""A store of the first format is read as it is, and written only after its migration, which changes no row.

`data/store_format_1.tar.gz` was made by the release before format 2: two runs with a carried column `price`, an
index, and an unfinished run.
"""

from contextlib import suppress
from itertools import count
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from old_stores import unpack_store
from store_samples import INFO, begin, row, table
from store_states import Killed, build_store_index, dying, no_index, rows_now, state_now

import embedder
from embedder.errors import StoreError
from embedder.plugins.maintain.migrate import migrate
from embedder.plugins.maintain.purge.purge import purge
from embedder.plugins.maintain.vacuum import vacuum
from embedder.store.files import StoreFiles
from embedder.store.journal.part_writer import write_part
from embedder.store.journal.runs import unfinished_runs
from embedder.store.layout import read_current
from embedder.store.maintenance.compact import PartTarget, compact
from embedder.store.maintenance.rollback import rollback
from embedder.store.publish.history import past_runs, publications
from embedder.store.publish.publication import ModelWork
from embedder.store.publish.publish import publish
from embedder.store.schema import FORMAT_VERSION
from embedder.store.store_info import bind_store, read_store_info

OLD = Path(__file__).parent / "data" / "store_format_1.tar.gz"


def unpack(folder: Path) -> StoreFiles:
    unpack_store(OLD, folder)
    return StoreFiles(folder / "store_format_1")


@pytest.fixture
def files(tmp_path):
    return unpack(tmp_path)


def test_an_old_store_is_read_and_searched_as_it_is(files):
    store = embedder.open_store(files.address)
    rows = {each["item_id"]: each["image_embedding"] for each in store.to_arrow().to_pylist()}
    assert rows == {"a.jpg": [1.0, 0.0], "b.jpg": [0.0, 1.0], "d.jpg": pytest.approx([0.6, 0.8])}
    assert store.rejects()["item_id"].to_pylist() == ["c.jpg"]
    (hit, *_) = store.search(np.array([0.0, 1.0], np.float32), 3)
    assert (hit.item_id, hit.carryover) == ("b.jpg", {"price": 2.5})
    assert [(run.is_current, run.record) for run in past_runs(files)] == [(False, None), (True, None)]


def test_who_would_write_is_told_to_migrate(files):
    attempts = [
        lambda: bind_store(files, INFO),
        lambda: build_store_index(files),
        lambda: rollback(files, None, no_index),
        lambda: compact(files, PartTarget()),
        lambda: vacuum(files),
        lambda: purge(files, ["a.jpg"], no_index),
    ]
    for attempt in attempts:
        with pytest.raises(StoreError, match=r"format version 1, .*embedder migrate --store"):
            attempt()


def test_rows_index_and_carried_columns_stay_and_items_get_their_new_columns(files):
    before, index = state_now(files), read_current(files).index
    was_older, new = migrate(files)
    after = state_now(files)
    assert after["embeddings"] == before["embeddings"]
    assert after["items"] == {key: each | {"stale": None} for key, each in before["items"].items()}
    assert read_current(files).index == index
    assert read_store_info(files).format_version == FORMAT_VERSION
    assert was_older
    assert (new.kind, new.num_items, new.num_rejected) == ("migration", 4, 1)
    assert read_current(files).model_fingerprint == INFO.model_fingerprint
    assert [each.run_id for each in publications(files)] == [new.run_id]
    assert "stale" in pa.schema(DeltaTable(files.uri("items")).schema().to_arrow()).names
    current = read_current(files)
    assert migrate(files) == (False, None), "a second migration finds nothing to do"
    assert read_current(files) == current


def test_the_next_run_works_on_a_migrated_store(files, said):
    migrate(files)
    assert len(said) == 1, "the unfinished run is named"
    run, metadata = begin(files, pa.schema({"price": pa.float64()}))
    write_part(files, metadata, 0, table(row("b.jpg", modified="t2"), row("f.jpg"), price=pa.array([3.0, 6.0])))
    publish([ModelWork(run, metadata)])
    prices = {item_id: each["price"] for (item_id, _), each in rows_now(files).items()}
    assert prices == {"a.jpg": 1.0, "b.jpg": 3.0, "d.jpg": 4.0, "f.jpg": 6.0}
    assert len(rows_now(files, "items")) == 5
    rows = state_now(files)
    compact(files, PartTarget())  # parts with and without the new column become one
    assert state_now(files) == rows
    rollback(files, None, no_index)
    assert len(rows_now(files, "items")) == 4


def test_an_unfinished_first_run_is_given_up_too(files):
    (unfinished,) = unfinished_runs(files)
    files.delete("CURRENT.json")
    migrate(files)
    again, _ = begin(files, pa.schema({"price": pa.float64()}))
    assert again.run_id > unfinished.run_id


def test_killed_between_any_two_steps_it_is_still_read_and_ends_when_done_again(tmp_path, monkeypatch):
    for number in count():
        files = unpack(tmp_path / str(number))
        before = rows_now(files)
        with dying(monkeypatch, number) as made, suppress(Killed):
            migrate(files)
        assert rows_now(files) == before
        migrate(files)
        assert rows_now(files) == before
        assert len(rows_now(files, "items")) == 4
        assert read_store_info(files).format_version == FORMAT_VERSION
        if len(made) < number:
            break
    assert len(made) >= 5


def test_a_store_of_a_newer_format_is_refused_by_everyone_in_one_line(files):
    files.write("store.json", files.read("store.json").replace(b'"format_version": 1', b'"format_version": 3'))
    attempts = [
        lambda: embedder.open_store(files.address),
        lambda: migrate(files),
        lambda: rollback(files, None, no_index),
        lambda: compact(files, PartTarget()),
        lambda: purge(files, ["a.jpg"], no_index),
        lambda: bind_store(files, INFO),
    ]
    for attempt in attempts:
        with pytest.raises(StoreError, match=r"store.json: format version 3, this embedder knows") as error:
            attempt()
        assert "\n" not in str(error.value)
