"""Entries of a journal are joined during a run; none is lost or doubled, whatever is killed or read when."""

import random

import pytest
from store_samples import begin, reject, row, table
from store_states import Killed, dying, finished_ids, new_store, no_index, publish_refresh, state_now

from embedder.executors import monitor as monitor_module
from embedder.executors.monitor import RunMonitor
from embedder.plugins.maintain.purge.purge import purge
from embedder.store.files import StoreFiles
from embedder.store.journal.journal import entry_names, stream_entries
from embedder.store.journal.journal_segments import find_entry, list_journal, names_in_journal, seal
from embedder.store.journal.part_writer import write_part
from embedder.store.journal.runs import finished_items, next_session
from embedder.store.publish.publication import ModelWork
from embedder.store.publish.publish import publish

NUM_TASKS = 12


def read_whole(files, run_id, but=()):
    """Entries with their figures, by name."""
    return sorted(stream_entries(files, run_id, but), key=lambda entry: entry.name)


def write_tasks(files, numbers=range(NUM_TASKS)):
    """Finished write tasks of a run in progress."""
    run, metadata = begin(files)
    for number in numbers:
        write_part(files, metadata, number, table(row(f"{number}.jpg"), reject(f"{number}-broken.jpg")))
    return run, metadata


@pytest.mark.parametrize("seed", range(5))
def test_any_partition_of_the_entries_into_segments_gives_the_same_records(files, seed):
    run, _ = write_tasks(files)
    before, items = read_whole(files, run.run_id), finished_items(run).part(0, 1).sort_by("item_id")
    names, chance = [entry.name for entry in before], random.Random(seed)
    chance.shuffle(names)
    while names:
        size = chance.randint(1, 5)
        seal(files, run.run_id, names[:size])
        names = names[size:]
        assert read_whole(files, run.run_id) == before
    assert not list_journal(files, run.run_id).entries, "each is in a segment"
    assert finished_items(run).part(0, 1).sort_by("item_id") == items
    assert entry_names(files, run.run_id, run.session) == {entry.name for entry in before}
    assert read_whole(files, run.run_id, but=[before[0].name]) == before[1:]


def test_killed_between_any_two_changes_each_entry_is_read_once_and_is_sealed_the_next_time(tmp_path, monkeypatch):
    number, is_whole = 0, False
    while not is_whole:
        files = new_store(tmp_path / str(number))
        run, _ = write_tasks(files, range(4))
        before = read_whole(files, run.run_id)
        with dying(monkeypatch, number) as made:
            try:
                seal(files, run.run_id, names_in_journal(files, run.run_id))
                is_whole = True
            except Killed:
                pass
        assert len(made) == (5 if is_whole else number), "one segment is made, and four files are deleted"
        assert read_whole(files, run.run_id) == before
        seal(files, run.run_id, names_in_journal(files, run.run_id))
        assert read_whole(files, run.run_id) == before
        assert not list_journal(files, run.run_id).entries
        number += 1
    assert number == 6


def test_entries_that_move_into_a_segment_while_they_are_read_are_read_once(files, monkeypatch):
    run, _ = write_tasks(files)
    before, read = read_whole(files, run.run_id), StoreFiles.read
    moved = []

    def read_while_they_move(self, path):
        if path.endswith(".json") and "/journal/" in path and not moved:
            moved.append(path)
            seal(files, run.run_id, names_in_journal(files, run.run_id))
        return read(self, path)

    monkeypatch.setattr(StoreFiles, "read", read_while_they_move)
    found = list(stream_entries(files, run.run_id))
    assert moved and sorted(found, key=lambda entry: entry.name) == before


def test_entries_that_move_into_a_segment_while_the_folder_is_listed_are_found(files, monkeypatch):
    run, _ = write_tasks(files, range(4))
    before, names, listing = read_whole(files, run.run_id), names_in_journal(files, run.run_id), StoreFiles.list

    def misses_both(self, folder, after=None):
        """A folder is listed name by name: those that came where it has been are missed, and those that went."""
        monkeypatch.setattr(StoreFiles, "list", listing)
        seal(files, run.run_id, names)
        return iter(())

    monkeypatch.setattr(StoreFiles, "list", misses_both)
    assert names_in_journal(files, run.run_id) == names
    again = begin(files)[1]
    write_part(files, again, 0, table(row("late.jpg")))
    monkeypatch.setattr(StoreFiles, "list", misses_both)
    assert [entry.name for entry in read_whole(files, run.run_id)][:4] == [entry.name for entry in before]


def test_of_a_task_that_was_begun_again_after_its_entry_was_sealed_the_last_entry_counts(files):
    run, metadata = write_tasks(files, range(2))
    seal(files, run.run_id, names_in_journal(files, run.run_id))
    again = write_part(files, metadata, 1, table(row("1.jpg"), reject("1-broken.jpg")), attempt=1)
    assert read_whole(files, run.run_id)[1] == again
    seal(files, run.run_id, [again.name])
    assert read_whole(files, run.run_id)[1] == again
    assert len(read_whole(files, run.run_id)) == 2


def test_a_file_that_is_there_already_is_never_replaced_by_a_segment(files, monkeypatch):
    run, _ = write_tasks(files, range(3))
    before = read_whole(files, run.run_id)
    monkeypatch.setattr(StoreFiles, "create", lambda self, path, data: False)
    seal(files, run.run_id, names_in_journal(files, run.run_id))
    assert len(list_journal(files, run.run_id).entries) == 3, "whoever wrote it may not have had these"
    assert read_whole(files, run.run_id) == before


def test_a_run_is_published_and_goes_on_by_its_segments_as_by_its_entries(tmp_path):
    published = []
    for name, is_sealed in (("small", False), ("sealed", True)):
        files = new_store(tmp_path / name)
        run, metadata = write_tasks(files)
        if is_sealed:
            seal(files, run.run_id, sorted(names_in_journal(files, run.run_id))[:8])
        assert next_session(run).session > run.session
        assert find_entry(files, run.run_id, f"{run.session}-000003") is not None
        assert find_entry(files, run.run_id, f"{run.session}-000099") is None
        publish([ModelWork(run, metadata)])
        published.append(state_now(files))
    assert [(len(each["embeddings"]), len(each["items"])) for each in published] == [(12, 24)] * 2
    assert published[0]["items"].keys() == published[1]["items"].keys()


def test_a_monitor_counts_each_task_once_and_joins_the_entries(files, monkeypatch):
    monkeypatch.setattr(monitor_module, "MIN_ENTRIES", 5)
    run, metadata = begin(files)
    progress = []
    with RunMonitor(run, progress.append):
        for number in range(NUM_TASKS):
            write_part(files, metadata, number, table(row(f"{number}.jpg"), reject(f"{number}-broken.jpg")))
    assert progress[-1] == 2 * NUM_TASKS
    there = list_journal(files, run.run_id)
    assert len(there.entries) < 5 and there.segments
    assert len(read_whole(files, run.run_id)) == NUM_TASKS


def test_a_purge_takes_its_entries_out_of_a_segment_and_the_run_goes_on_with_the_others(files):
    publish_refresh(files, row("a.jpg"), row("1.jpg", modified="before"))
    run, _ = write_tasks(files, range(4))
    seal(files, run.run_id, names_in_journal(files, run.run_id))
    assert purge(files, ["3-broken.jpg"], no_index).plan.given_up == ()
    names = [entry.name for entry in read_whole(files, run.run_id)]
    assert names == [f"{run.session}-00000{number}" for number in range(3)]
    assert sorted(finished_ids(run))[:2] == ["0-broken.jpg", "0.jpg"]
