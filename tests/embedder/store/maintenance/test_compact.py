"""Compaction makes few files of many and changes nothing else."""

import json
import math
from contextlib import suppress
from itertools import count

import numpy as np
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from store_samples import begin, row, table
from store_states import Killed, build_store_index, dying, new_store, publish_refresh, rows_now, state_now, vectors_now

from embedder.errors import StoreError
from embedder.retrieval.store_api import open_store
from embedder.store.journal.part_writer import write_part
from embedder.store.layout import STORE_FILE, read_current
from embedder.store.maintenance.compact import MIN_SAVED, PartTarget, compact, plan_groups
from embedder.store.part_file import PartFile
from embedder.store.publish.history import past_runs, publications
from embedder.store.publish.publication import ModelWork
from embedder.store.publish.publish import publish
from embedder.store.schema import TABLES
from embedder.store.tables.tables import RecordTable

TARGET = PartTarget(num_rows=100, size_bytes=1000)


def part(path: str, num_rows: int = 10, size_bytes: int = 100) -> PartFile:
    return PartFile(table="items", path=path, num_rows=num_rows, size_bytes=size_bytes, stats="", session="")


def many_parts(files, number=6):
    """One publication of so many part files, each with two rows, one of them a video's."""
    run, metadata = begin(files)
    for task in range(number):
        vector = [math.sin(task / 3), math.cos(task / 3)]
        video = [
            row(f"{task}.mp4", segment=segment, num_vectors=2 if segment else None, image_embedding=vector)
            for segment in (0, 1)
        ]
        write_part(files, metadata, task, table(row(f"{task}.jpg", image_embedding=vector), *video))
    publish([ModelWork(run, metadata)])


def found(files) -> list:
    hits = open_store(files.address).search(np.array([0.0, 1.0], np.float32), 9)
    return [(hit.item_id, hit.segment, hit.score) for hit in hits]


def grouped(parts) -> list[list[str]]:
    return [[each.path for each in group] for group in plan_groups(parts, TARGET)]


def test_neighbours_are_put_together_up_to_the_target():
    assert grouped([part(name, 40) for name in "dacbe"]) == [["a", "b"], ["c", "d"]]
    assert grouped([part(name, size_bytes=400) for name in "abcd"]) == [["a", "b"], ["c", "d"]]


def test_files_of_more_than_half_the_target_and_single_ones_stay():
    assert grouped([part("a", 51), part("b", size_bytes=501), part("c")]) == []
    assert grouped([part("a", 50), part("b", 51), part("c", 50)]) == [["a", "c"]]
    assert grouped([]) == []


def test_rows_stay_what_they_were_to_the_last_bit_in_fewer_files(files):
    many_parts(files)
    before, versions = state_now(files), read_current(files)
    new, tables = compact(files, PartTarget(num_rows=9))
    assert state_now(files) == before, "run_id and vectors among them"
    assert [(each.table, each.num_files_before, each.num_files_after) for each in tables] == [
        ("items", 6, 2),
        ("embeddings", 6, 2),
    ]
    assert (new.kind, new.num_items, new.num_vectors) == ("compaction", 12, 18)
    assert read_current(files).embeddings == versions.embeddings + 1
    assert all(run.can_be_read for run in past_runs(files)), "the version before it, too"
    assert [each.kind for each in publications(files)] == ["embed", "compaction"]
    parts = [files.uri(f"embeddings/{path}") for path in RecordTable(files, "embeddings").paths()]
    assert [pq.ParquetFile(path).metadata.num_rows for path in parts] == [9, 9], "none is larger than the target"
    current = read_current(files)
    assert compact(files, PartTarget(num_rows=9))[0] is None, "a second one finds nothing to do"
    assert read_current(files) == current


def test_the_index_is_kept_and_answers_as_before(files):
    many_parts(files)
    number, _ = build_store_index(files)
    before = found(files)
    compact(files, PartTarget())
    assert read_current(files).index == number
    assert found(files) == before
    assert len(before) == 9


def test_a_refresh_compacts_only_where_it_pays(files):
    many_parts(files)
    assert compact(files, min_saved=MIN_SAVED)[0] is None
    many = new_store(files.folder.parent / "many")
    many_parts(many, 20)
    before = state_now(many)
    assert compact(many, min_saved=MIN_SAVED)[0].kind == "compaction"
    assert state_now(many) == before
    assert compact(many, min_saved=MIN_SAVED)[0] is None


def test_after_many_files_went_the_log_has_a_checkpoint_from_which_all_read(files, monkeypatch):
    monkeypatch.setattr("embedder.store.maintenance.compact.MIN_CHECKPOINTED", 5)
    many_parts(files)
    before = state_now(files)
    compact(files, PartTarget())
    for name in TABLES:
        last = json.loads(files.read(f"{name}/_delta_log/_last_checkpoint"))
        assert last["version"] == getattr(read_current(files), name)
        read = DeltaTable(files.uri(name)).to_pyarrow_table()
        assert read.num_rows == RecordTable(files, name).num_rows()
        files.delete(f"{name}/_delta_log/{last['version'] - 1:020d}.json")  # nobody needs it any more
    assert state_now(files) == before
    publish_refresh(files, row("new.jpg"))
    assert len(rows_now(files)) == 19


@pytest.mark.parametrize("vectors", [None, "float16"])
def test_an_unfinished_run_is_not_given_up_for_it(files, vectors):
    many_parts(files)
    run, metadata = begin(files)
    write_part(files, metadata, 0, table(row("z.jpg")))
    before = files.read(STORE_FILE)
    with pytest.raises(StoreError, match=f"run {run.run_id} is not finished.*finish it first"):
        compact(files, PartTarget(), vectors=vectors)
    assert files.read(STORE_FILE) == before, "a refusal changes nothing"


def test_changed_rows_replace_theirs_in_a_compacted_file(files):
    many_parts(files)
    compact(files, PartTarget())
    publish_refresh(files, row("2.jpg", image_embedding=[0.0, -1.0], modified="t1"))
    assert vectors_now(files)["2.jpg"] == [0.0, -1.0]
    assert len(rows_now(files)) == 18


@pytest.mark.medium
def test_killed_between_any_two_steps_rows_stay_and_it_ends_when_done_again(tmp_path, monkeypatch):
    for number in count():
        files = new_store(tmp_path / str(number))
        many_parts(files, 3)
        before = state_now(files)
        with dying(monkeypatch, number) as made, suppress(Killed):
            compact(files, PartTarget())
        assert state_now(files) == before
        compact(files, PartTarget())
        assert state_now(files) == before
        assert len(RecordTable(files, "items").paths()) == 1
        publish_refresh(files, row("z.jpg"))
        assert len(rows_now(files)) == len(before["embeddings"]) + 1
        if len(made) < number:
            break
    assert len(made) >= 6
