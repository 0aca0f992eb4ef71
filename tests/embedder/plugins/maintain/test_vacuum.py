"""Vacuum deletes unneeded files, and never those that are published, kept, or of an unfinished run."""

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import count

import numpy as np
import pytest
from command_runs import run_here
from store_samples import begin, row, table
from store_states import (
    Killed,
    build_store_index,
    dying,
    finished_ids,
    new_store,
    no_index,
    publish_refresh,
    record,
    rows_at,
    rows_now,
    set_clock,
    state_now,
)

from embedder.errors import StoreError
from embedder.plugins.maintain.vacuum import kept_publications, vacuum
from embedder.retrieval.store_api import open_store
from embedder.store.journal.part_writer import write_part
from embedder.store.layout import CURRENT_FILE, read_current
from embedder.store.maintenance.rollback import rollback
from embedder.store.publish.history import past_runs, publications
from embedder.store.publish.publication import ModelWork
from embedder.store.publish.publish import publish

NOW = datetime(2026, 3, 10, tzinfo=UTC)
WEEK = timedelta(days=7)


@pytest.fixture
def files(tmp_path):
    return new_store(tmp_path / "store")


def nights(files, number=4):
    """So many publications that each replace the same row."""
    for night in range(number):
        publish_refresh(files, row("a.jpg", modified=f"t{night}", caption=f"night {night}"))


def at(run_id: str, days_ago: float):
    return record(run_id).model_copy(update={"published_at": NOW - timedelta(days=days_ago)})


def test_within_the_grace_period_nothing_that_was_published_goes(files):
    nights(files)
    vacuum(files)
    assert all(run.can_be_read for run in past_runs(files))


@pytest.mark.parametrize("keep_days", [1e6, 1e12, float("inf")])
def test_days_without_end_keep_all(files, keep_days):
    nights(files, 2)
    done = vacuum(files, keep_days=keep_days, keep_versions=1)
    assert done.kept == tuple(each.run_id for each in publications(files))


def test_without_grace_only_the_newest_versions_stay_and_the_bytes_are_told(files):
    nights(files)
    before = {info.path: info.size_bytes for info in files.list("")}
    promised = vacuum(files, keep_days=0, keep_versions=2, dry_run=True)
    assert {info.path: info.size_bytes for info in files.list("")} == before, "a dry run deletes nothing"
    done = vacuum(files, keep_days=0, keep_versions=2)
    assert done == promised
    left = {info.path: info.size_bytes for info in files.list("")}
    assert left.keys() <= before.keys()
    assert {path for path in left if left[path] != before[path]} == {CURRENT_FILE}, "which names what is deleted"
    assert {info.path: info.size_bytes for info in done.deleted} == {
        path: size_bytes for path, size_bytes in before.items() if path not in left
    }
    assert done.size_bytes == sum(before[path] for path in before.keys() - left.keys())
    assert [run.can_be_read for run in past_runs(files)] == [False, False, True, True]
    assert len(list(files.list("embeddings/_delta_log"))) == 5, "the log stays whole"
    assert not any("/journal/" in path for path in left)
    assert vacuum(files, keep_days=0, keep_versions=2).deleted == ()


def test_who_opened_a_version_goes_on_reading_it_through_a_vacuum(files):
    nights(files, 2)
    opened = open_store(files.address)
    publish_refresh(files, row("a.jpg", modified="later", caption="later"))
    vacuum(files, keep_versions=1)
    assert opened.to_arrow(["caption"]).to_pylist() == [{"caption": "night 1"}]
    assert opened.items().num_rows == 1


def test_a_version_counts_as_old_from_when_the_next_one_took_its_place():
    history = [at("1", 30), at("2", 8), at("3", 1), at("4", 0.5)]
    assert [each.run_id for each in kept_publications(history, NOW, WEEK, 1)] == ["4", "2", "3"]


def test_the_newest_versions_stay_however_old():
    history = [at("1", 300), at("2", 200), at("3", 100)]
    assert [each.run_id for each in kept_publications(history, NOW, WEEK, 2)] == ["2", "3"]
    assert [each.run_id for each in kept_publications(history, NOW, timedelta(0), 0)] == ["3"]


def test_a_clock_set_back_deletes_nothing_early():
    history = [at("1", 20), at("2", 1), at("3", 3000), at("4", 2999)]  # the last two while the clock was wrong
    assert [each.run_id for each in kept_publications(history, NOW, WEEK, 1)] == ["4", "1", "2", "3"]
    years_ago = NOW - timedelta(days=3000)
    assert len(kept_publications(history, years_ago, WEEK, 1)) == 4


def test_a_run_id_tells_the_time_where_the_clock_does_not():
    history = [
        at("20260309T000000Z-aaaa", 3000),
        at("20260309T000001Z-bbbb", 3000),
        at("20260309T000002Z-cccc", 3000),
    ]
    assert len(kept_publications(history, NOW, WEEK, 1)) == 3


def test_an_unfinished_run_keeps_its_parts_and_its_journal_and_ends(files):
    nights(files, 2)
    _, metadata = begin(files)
    write_part(files, metadata, 0, table(row("b.jpg")))
    vacuum(files, keep_days=0, keep_versions=1)
    run, metadata = begin(files)
    assert finished_ids(run) == ["b.jpg"]
    publish([ModelWork(run, metadata)])
    assert {item_id for item_id, _ in rows_now(files)} == {"a.jpg", "b.jpg"}


def test_what_a_run_was_given_to_read_goes_with_it(files):
    nights(files, 2)
    run, metadata = begin(files)
    pictures = f"runs/{run.run_id}/input/0a1b.parquet"
    files.write(pictures, b"pictures")
    vacuum(files)
    assert files.exists(pictures), "the run may be gone on with"
    write_part(files, metadata, 0, table(row("b.jpg")))
    publish([ModelWork(run, metadata)])
    vacuum(files)
    assert not files.exists(pictures)


def test_parts_of_a_run_that_was_given_up_go(files):
    nights(files, 2)
    run, metadata = begin(files)
    write_part(files, metadata, 0, table(row("z.jpg")))
    rollback(files, None, no_index)
    vacuum(files)
    assert not [info for info in files.list("") if run.run_id in info.path and not info.path.endswith("run.json")]


def test_old_index_versions_go_and_those_of_kept_publications_stay(files):
    nights(files, 1)
    first, _ = build_store_index(files)
    vacuum(files)
    assert {int(info.path.split("/")[1]) for info in files.list("index")} == {first}
    nights(files, 2)
    second, _ = build_store_index(files)
    again, _ = build_store_index(files, kind="flat")
    vacuum(files)
    assert {int(info.path.split("/")[1]) for info in files.list("index")} == {first, second, again}
    vacuum(files, keep_days=0, keep_versions=1)
    left = {int(info.path.split("/")[1]) for info in files.list("index")}
    assert left == {second, again}, "who opened the publication may be about to open its first index"
    assert len(open_store(files.address).search(np.array([1.0, 0.0], np.float32), 5)) == 1


def test_files_that_are_not_the_stores_are_left_alone(files):
    nights(files, 1)
    for path in ("embeddings/mine.parquet", "embeddings/part-mine.parquet", "notes.txt", "index/notes.txt"):
        files.write(path, b"mine")
    vacuum(files, keep_days=0)
    assert all(files.exists(path) for path in ("embeddings/mine.parquet", "notes.txt", "index/notes.txt"))


def test_what_a_half_made_commit_put_into_the_newest_version_stays(files, monkeypatch):
    nights(files, 2)
    with dying(monkeypatch, 2), pytest.raises(Killed):
        rollback(files, None, no_index)
    ahead = {name: list(rows_at(files, read_current(files), name)) for name in ("items", "embeddings")}
    vacuum(files, keep_days=0, keep_versions=1)
    assert {name: list(rows_at(files, read_current(files), name)) for name in ahead} == ahead
    assert state_now(files)


@pytest.mark.medium
def test_killed_at_any_moment_it_harms_nothing_and_ends_when_done_again(tmp_path, monkeypatch):
    for number in count(0, 2):
        files = new_store(tmp_path / str(number))
        nights(files, 3)
        state, kept = state_now(files), publications(files)[-2:]
        with dying(monkeypatch, number) as made, suppress(Killed):
            vacuum(files, keep_days=0, keep_versions=2)
        assert state_now(files) == state
        vacuum(files, keep_days=0, keep_versions=2)
        assert [run.can_be_read for run in past_runs(files)] == [False, True, True]
        assert rows_at(files, kept[0])
        if len(made) < number:
            break


def test_ages_are_counted_by_the_wall_clock(files, monkeypatch):
    nights(files, 3)
    set_clock(monkeypatch, lambda: datetime.now(UTC) + timedelta(days=8), files)
    vacuum(files, keep_versions=1)
    assert [run.can_be_read for run in past_runs(files)] == [False, False, True]


def opened(files, run_id: str) -> list:
    """Content of a version as a user sees it: its rows, its items, the hits of a search."""
    store = open_store(files.address, version=run_id)
    hits = store.search(np.array([1.0, 0.0], np.float32), 50)
    return [store.to_arrow().num_rows, store.items().num_rows, len(hits)]


def adding_nights(files, number: int) -> dict[str, list]:
    """Nights that add a picture each and replace none; gives what each version holds, the index built each time."""
    found = {}
    for night in range(number):
        run = publish_refresh(files, row(f"{night}.jpg"))
        build_store_index(files)
        found[run.run_id] = [night + 1] * 3
    return found


@pytest.mark.parametrize("dry_run", [True, False])
def test_each_version_that_is_said_to_be_readable_is_and_each_other_is_not(files, dry_run):
    expected = adding_nights(files, 3)  # the newest needs all files of the older ones
    replaced = publish_refresh(files, row("0.jpg", modified="t1"))
    newest = publish_refresh(files, row("1.jpg", modified="t1"))
    expected |= {run.run_id: [3, 3, 3] for run in (replaced, newest)}
    done = vacuum(files, keep_days=0, keep_versions=1, dry_run=dry_run)
    if dry_run:
        vacuum(files, keep_days=0, keep_versions=1)
    assert {run.run_id for run in past_runs(files) if run.can_be_read} == set(done.kept)
    for run_id, held in expected.items():
        if run_id in done.kept:
            assert opened(files, run_id) == held
        else:
            with pytest.raises(StoreError, match="can't be read any more"):
                open_store(files.address, version=run_id)
    assert (done.kept, done.needed) == ((newest.run_id,), ())


def test_versions_that_only_others_keep_are_counted_named_and_searched_without_their_indexes(files):
    expected = adding_nights(files, 3)
    done = vacuum(files, keep_days=0, keep_versions=1)
    assert done.kept == tuple(expected)
    assert done.needed == tuple(expected)[:2]
    assert {int(info.path.split("/")[1]) for info in files.list("index")} == {3}
    assert {run_id: opened(files, run_id) for run_id in expected} == expected
    assert open_store(files.address, version=done.needed[0]).version == f"{done.needed[0]}/exact"


def test_the_command_says_as_many_as_can_be_read(files, run_embedder):
    expected = adding_nights(files, 3)
    arguments = ("vacuum", "--store", files.address, "--keep-days", 0, "--keep-versions", 1)
    for more in (["--dry-run"], []):
        code, found, stderr = run_embedder(*arguments, *more, "--json")
        assert code == 0, stderr
        assert (found["kept"], found["needed"]) == (list(expected), list(expected)[:2])
    shown = run_here(*arguments).stdout
    assert "3 publications stay readable" in shown
    assert "2 only because" in shown
    for time in ("t1", "t2"):
        publish_refresh(files, *(row(f"{count}.jpg", modified=time) for count in range(3)))
    assert "1 publication stays readable" in run_here(*arguments).stdout
