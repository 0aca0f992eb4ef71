"""Publications stay known, in their order, and each version is read as it was."""

import json

import pytest
from deltalake import DeltaTable
from store_samples import begin, reject, row, table
from store_states import publish_refresh, record

import embedder
from embedder.errors import StoreError
from embedder.store.files import StoreFiles
from embedder.store.journal.part_writer import write_part
from embedder.store.journal.runs import last_run, unfinished_runs
from embedder.store.layout import CURRENT_FILE, read_current
from embedder.store.maintenance.compact import compact
from embedder.store.publish.current import count_rows
from embedder.store.publish.history import (
    find_publication,
    latest_publications,
    one_before,
    past_runs,
    publications,
    published_chain,
    readable,
    same_rows,
)
from embedder.store.publish.rejects import find_rejects
from embedder.store.tables.tables import RecordTable


def test_every_publication_is_told_with_what_it_held(files):
    first = publish_refresh(files, row("a.jpg"), row("b.jpg"))
    second = publish_refresh(files, row("c.jpg"), reject("d.jpg"))
    history = publications(files)
    assert [each.run_id for each in history] == [first.run_id, second.run_id]
    assert [(each.num_items, each.num_vectors, each.num_rejected) for each in history] == [(2, 2, 0), (4, 3, 1)]
    assert [each.previous for each in history] == [None, first.run_id]
    assert [run.is_current for run in past_runs(files)] == [False, True]
    assert all(run.can_be_read for run in past_runs(files))


def test_a_run_that_died_before_its_swap_is_no_publication():
    records = [record("1"), record("2", "1"), record("3", "1")]
    assert [each.run_id for each in published_chain("3", records)] == ["1", "3"]


def test_runs_from_before_there_were_records_are_told_without_figures(files):
    old = publish_refresh(files, row("a.jpg"))
    files.delete(f"runs/{old.run_id}/published.json")
    (oldest,) = past_runs(files)
    assert (oldest.run_id, oldest.record, oldest.is_current, oldest.can_be_read) == (old.run_id, None, True, True)
    new = publish_refresh(files, row("b.jpg"))
    assert [(run.run_id, run.record is not None, run.can_be_read) for run in past_runs(files)] == [
        (old.run_id, False, False),
        (new.run_id, True, True),
    ]


def test_each_version_is_read_as_it_was(files):
    first = publish_refresh(files, row("a.jpg", caption="then"))
    publish_refresh(files, row("a.jpg", caption="now", modified="t1"), row("b.jpg"))
    then = embedder.open_store(files.address, version=first.run_id)
    assert then.to_arrow(["item_id", "caption"]).to_pylist() == [{"item_id": "a.jpg", "caption": "then"}]
    assert then.items()["modified"].to_pylist() == ["t0"]
    assert embedder.open_store(files.address).to_arrow().num_rows == 2


def test_a_version_of_which_a_file_is_gone_is_refused_in_one_line(files):
    first = publish_refresh(files, row("a.jpg"))
    (path,) = RecordTable(files, "embeddings").paths()
    publish_refresh(files, row("a.jpg", modified="t1"))
    files.delete(f"embeddings/{path}")
    with pytest.raises(StoreError, match=rf"version {first.run_id} can't be read any more.*embedder history") as error:
        embedder.open_store(files.address, version=first.run_id)
    assert "\n" not in str(error.value)
    assert [run.can_be_read for run in past_runs(files)] == [False, True]


def test_a_version_that_never_was_is_refused(files):
    publish_refresh(files, row("a.jpg"))
    with pytest.raises(StoreError, match="no run 2020 among what it published"):
        find_publication(files, "2020")


def test_going_back_steps_over_publications_that_changed_no_row():
    history = [record("1"), record("2", "1"), record("3", "2", "compaction"), record("4", "3", "migration")]
    assert one_before(history).run_id == "1"
    assert one_before(history[:1]) is None
    assert one_before([record("1"), record("2", "1", "compaction")]) is None


def test_going_back_twice_goes_back_by_two():
    history = [record("1"), record("2", "1"), record("3", "2"), record("4", "3", "rollback", restores="2")]
    assert one_before(history).run_id == "1"
    assert one_before([*history, record("5", "4")]).run_id == "4"


def test_a_record_of_an_unknown_format_is_refused_in_one_line(files):
    run = publish_refresh(files, row("a.jpg"))
    path = f"runs/{run.run_id}/published.json"
    files.write(path, json.dumps(json.loads(files.read(path)) | {"format_version": 99}).encode())
    with pytest.raises(StoreError, match=r"published.json: format version 99, this embedder knows"):
        past_runs(files)


def test_versions_are_told_apart_from_those_whose_log_entries_are_gone(files):
    publish_refresh(files, row("a.jpg"))
    ahead = read_current(files).model_copy(update={"embeddings": 99})
    assert readable(files, [ahead]) == set()


def test_a_log_that_lost_its_beginning_is_judged_by_what_is_left(files):
    first, second, third = (publish_refresh(files, row(f"{name}.jpg")) for name in "abc")
    for name in ("items", "embeddings"):
        DeltaTable(files.uri(name), version=second.items).create_checkpoint()
        for number in (0, 1):
            files.delete(f"{name}/_delta_log/{number:020d}.json")
    assert readable(files, [first, second, third]) == {second.run_id, third.run_id}


def test_an_index_fits_the_versions_that_hold_the_same_rows():
    kinds = ("embed", "refresh", "compaction", "refresh", "migration", "rollback", "compaction")
    restores = {6: "2"}
    history = [
        record(str(number), kind=kind, restores=restores.get(number)).model_copy(update={"embeddings": number})
        for number, kind in enumerate(kinds, 1)
    ]
    assert same_rows(reversed(history)) == {7, 6, 2}
    assert same_rows(history[4::-1]) == {5, 4}
    assert same_rows(history[2::-1]) == {3, 2}
    assert same_rows([]) == set()


def test_counts_by_what_came_and_went_are_those_of_all_files(files):
    publish_refresh(files, row("a.jpg"), row("b.jpg"), reject("c.jpg"))
    publish_refresh(files, row("d.jpg"), reject("b.jpg"))
    publish_refresh(files, reject("e.jpg", error_type="NoImage"), retired=["a.jpg"])
    publish_refresh(files, row("c.jpg"), row("f.jpg"))
    compact(files)
    publish_refresh(files, row("g.jpg"))
    for each in publications(files):
        counted = count_rows(files, each, {})
        assert counted == {name: getattr(each, name) for name in counted}


def test_a_publication_reads_no_record_of_items_that_stay(files, monkeypatch):
    for number in range(5):
        publish_refresh(files, row(f"{number}.jpg"))
    read = []
    reading = RecordTable._read_file

    def noted(self, path, columns):
        read.append((self.name, path, columns))
        return reading(self, path, columns)

    monkeypatch.setattr(RecordTable, "_read_file", noted)
    new = publish_refresh(files, row("new.jpg"))
    assert (new.num_items, new.num_rejected, read) == (6, 0, [])


def test_rejects_are_found_without_the_files_that_hold_none(files):
    publish_refresh(files, row("a.jpg"))
    publish_refresh(files, reject("b.jpg"), row("c.jpg"))
    first = RecordTable(files, "items").paths()[0]
    files.delete(f"items/{first}")
    assert find_rejects(files).items["item_id"].to_pylist() == ["b.jpg"]


def noted_reads(monkeypatch) -> list[str]:
    """Paths that stores read from here on."""
    read, reading = [], StoreFiles.read

    def noted(self, path):
        read.append(path)
        return reading(self, path)

    monkeypatch.setattr(StoreFiles, "read", noted)
    return read


def test_the_last_publications_are_read_one_by_one_as_far_as_they_are_needed(files, monkeypatch):
    made = [publish_refresh(files, row(f"{number}.jpg")) for number in range(4)]
    assert [each.run_id for each in latest_publications(files)] == [each.run_id for each in reversed(made)]
    read = noted_reads(monkeypatch)
    assert next(latest_publications(files)).run_id == made[-1].run_id
    assert read == [CURRENT_FILE, f"runs/{made[-1].run_id}/published.json"]


def test_runs_are_found_by_their_folders_and_only_those_after_the_publication_are_read(files, monkeypatch):
    for number in range(3):
        publish_refresh(files, row(f"{number}.jpg"))
    run, metadata = begin(files)
    write_part(files, metadata, 0, table(row("x.jpg")))
    monkeypatch.setattr(StoreFiles, "list", None)
    read = noted_reads(monkeypatch)
    assert [each.run_id for each in unfinished_runs(files)] == [run.run_id]
    assert last_run(files).run_id == run.run_id
    assert read == [CURRENT_FILE, *[f"runs/{run.run_id}/run.json"] * 2]
