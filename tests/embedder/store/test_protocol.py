"""Writers that were overtaken, at any of their changes, and requests that come late: what is published stays right."""

from dataclasses import dataclass
from itertools import count

import pytest
from overtaken_writers import Late, Operation, Steps, Stepwise, carried_out, copied, next_writer, sleeping
from store_samples import row
from store_states import (
    Killed,
    build_store_index,
    new_store,
    no_index,
    publish_refresh,
    rows_at,
    state_now,
    vectors_now,
)

from embedder.errors import StoreError
from embedder.plugins.maintain.purge.audit import scan_store
from embedder.plugins.maintain.purge.id_matcher import ItemNames
from embedder.plugins.maintain.purge.purge import purge
from embedder.plugins.maintain.store_check.check import check_store
from embedder.plugins.maintain.vacuum import vacuum
from embedder.store.files import StoreFiles
from embedder.store.layout import Current, read_current
from embedder.store.lock import write_lock
from embedder.store.maintenance.compact import PartTarget, compact
from embedder.store.maintenance.rollback import rollback
from embedder.store.publish.current import move_current
from embedder.store.publish.deletions import delete_listed
from embedder.store.publish.history import past_runs, publications, readable
from embedder.store.publish.publish import finish_publication
from embedder.store.publish.tombstones import read_purged
from embedder.store.schema import TABLES
from embedder.store.tables.tables import RecordTable
from embedder.store_index import keep_index
from index.versions import list_versions

UP = [0.0, 1.0]
FIRST_ROWS = ("a.jpg", "b.jpg", "ours.jpg", "theirs.jpg")
OPERATIONS: dict[str, Operation] = {
    "vacuum": lambda files: vacuum(files, keep_days=0, keep_versions=1),
    "rollback": lambda files: rollback(files, publications(files)[0].run_id, no_index),
    "refresh": lambda files: publish_refresh(files, row("b.jpg", modified="t9", image_embedding=UP), row("new.jpg")),
    "compact": lambda files: compact(files, PartTarget()),
}


@dataclass
class Seen:
    """What a store holds for its readers."""

    current: Current
    rows: dict
    versions: dict[str, dict]
    purged: set[str]


def seen(files: StoreFiles) -> Seen:
    history = publications(files)
    whole = readable(files, history)
    versions = {each.run_id: rows_at(files, each) for each in history if each.run_id in whole}
    return Seen(read_current(files), state_now(files), versions, set(read_purged(files).hashes))


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> StoreFiles:
    """Three publications, each of which has rewritten files of the one before."""
    files = new_store(tmp_path_factory.mktemp("base") / "store")
    publish_refresh(files, *map(row, FIRST_ROWS))
    publish_refresh(files, row("b.jpg", modified="t1", image_embedding=UP), row("c.jpg"))
    publish_refresh(files, row("a.jpg", modified="t2", image_embedding=UP))
    return files


def overtaken_everywhere(base, place, ours: Operation, theirs: Operation, stride: int = 1, start: int = 0) -> int:
    """Overtake a writer before each of its changes; gives how often, and checks what is left each time."""
    for number in count(start, stride):
        files = copied(base, f"{place}/{number}")
        sleeper = sleeping(files)
        left: list[tuple[Seen, bool]] = []

        def overtake(files=files, sleeper=sleeper, left=left) -> None:
            is_locked = sleeper.lease is not None
            carried_out(next_writer(files), theirs)
            left.append((seen(files), is_locked))

        steps = Steps(number, overtake)
        sleeper.backend = Stepwise(sleeper.backend, steps)
        error = carried_out(sleeper, ours)
        if not steps.was_interrupted:
            return number // stride
        ((after, is_locked),) = left
        check_that_nothing_is_lost(files, after, error is not None or is_locked, steps.made)
    raise AssertionError


def check_that_nothing_is_lost(files: StoreFiles, after: Seen, was_overtaken: bool, made: list[str]) -> None:
    """What the second writer left is there, and the next one builds on it."""
    now = seen(files)
    if was_overtaken:
        assert now.current == after.current, made
        assert now.rows == after.rows, made
        assert now.versions == after.versions, made
    assert now.purged >= after.purged, made
    assert carried_out(next_writer(files), lambda own: publish_refresh(own, row("later.jpg"))) is None
    expected = {item for item, _ in now.rows["embeddings"]} | {"later.jpg"}
    assert set(vectors_now(files)) - {"new.jpg"} == expected - {"new.jpg"}, made  # a run is resumed by any refresh
    current = read_current(files)
    for name in TABLES:
        assert RecordTable(files, name).paths() == RecordTable(files, name, getattr(current, name)).paths()


PAIRS = [(ours, theirs) for ours in OPERATIONS for theirs in OPERATIONS]


@pytest.mark.slow
@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_whoever_is_overtaken_at_whatever_step_changes_nothing_any_more(base, tmp_path, ours, theirs):
    assert overtaken_everywhere(base, tmp_path, OPERATIONS[ours], OPERATIONS[theirs]) >= 5


@pytest.mark.medium
def test_an_overtaken_vacuum_deletes_nothing_that_a_rollback_has_published(base, tmp_path, bucket):
    ours, theirs = OPERATIONS["vacuum"], OPERATIONS["rollback"]
    assert overtaken_everywhere(base, tmp_path, ours, theirs, 5) > 2
    assert overtaken_everywhere(base, bucket, ours, theirs, 12, 1) > 1


@pytest.mark.medium
def test_an_overtaken_rollback_can_not_publish_what_a_vacuum_has_deleted(base, tmp_path, bucket):
    ours, theirs = OPERATIONS["rollback"], OPERATIONS["vacuum"]
    assert overtaken_everywhere(base, tmp_path, ours, theirs, 3) > 1
    assert overtaken_everywhere(base, bucket, ours, theirs, 8, 1) > 1


def purge_of(item: str) -> Operation:
    return lambda files: purge(files, [item], no_index)


@pytest.mark.medium
@pytest.mark.parametrize("is_remote", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_overtaken_purge_brings_no_purged_item_back_and_forgets_none(base, tmp_path, request, is_remote):
    place, stride = (request.getfixturevalue("bucket"), 11) if is_remote else (tmp_path, 7)
    for number in count(2, stride):
        files = copied(base, f"{place}/{number}")
        sleeper = sleeping(files)

        def overtake(files=files) -> None:
            assert carried_out(next_writer(files), purge_of("theirs.jpg")) is None

        steps = Steps(number, overtake)
        sleeper.backend = Stepwise(sleeper.backend, steps)
        carried_out(sleeper, purge_of("ours.jpg"))
        if not steps.was_interrupted:
            break
        check_that_only_unneeded_parts_hold(files, "theirs.jpg", steps.made)
        assert {"a.jpg", "b.jpg", "c.jpg"} <= set(vectors_now(files)), steps.made
        known = read_purged(files)
        assert known.hash_of("theirs.jpg") in known.hashes, steps.made
        assert carried_out(next_writer(files), purge_of("ours.jpg")) is None, steps.made
        vacuum(files)
        assert scan_store(files, ItemNames({"ours.jpg", "theirs.jpg"})).found_in == ()
        assert set(vectors_now(files)) == {"a.jpg", "b.jpg", "c.jpg"}
        assert len(read_purged(files).hashes) == 2
    assert number > 15


def check_that_only_unneeded_parts_hold(files: StoreFiles, item: str, made: list[str]) -> None:
    """A part file that the overtaken purge was about to write may come, which no version has: a vacuum deletes it."""
    needed = {f"{name}/{path}" for name in TABLES for path in RecordTable(files, name).paths()}
    needed |= {
        f"{name}/{path}"
        for each in publications(files)
        for name in TABLES
        for path in RecordTable(files, name, getattr(each, name)).paths()
    }
    found = set(scan_store(files, ItemNames({item})).found_in)
    assert found <= {made[made.index("the other's") + 1].removeprefix("put ")} - needed, made


@pytest.mark.medium
@pytest.mark.parametrize(
    "pattern",
    ["embeddings/_delta_log/*", pytest.param("runs/*/published.json", marks=pytest.mark.slow), "CURRENT.json"],
)
def test_a_late_request_of_an_overtaken_writer_is_never_taken_for_ours(base, bucket, pattern):
    for number in count(1, 12):
        files = copied(base, f"{bucket}/{number}")
        dying, before = sleeping(files), seen(files)
        dying.backend = late = Late(dying.backend, pattern)
        with pytest.raises(Killed):
            carried_out(dying, OPERATIONS["rollback"])
        own = next_writer(files)
        steps = Steps(number, late.arrive)
        own.backend = Stepwise(own.backend, steps)
        refused = carried_out(own, OPERATIONS["refresh"])
        if not steps.was_interrupted:
            break
        vectors = vectors_now(files)
        if refused is None and read_current(files).restores is None:
            assert (vectors["new.jpg"], vectors["b.jpg"]) == ([1.0, 0.0], UP)
        assert carried_out(next_writer(files), lambda own: publish_refresh(own, row("later.jpg"))) is None
        now = seen(files)
        assert {run_id: now.versions[run_id] for run_id in before.versions} == before.versions
        for name in TABLES:
            held = RecordTable(files, name, getattr(now.current, name)).paths()
            assert RecordTable(files, name).paths() == held, "the newest version is what is published"
    assert number > 8


@pytest.mark.medium
@pytest.mark.parametrize("is_remote", [False, True])
def test_a_listing_that_lacks_the_newest_entries_of_the_logs_loses_nothing(base, tmp_path, request, is_remote):
    files = copied(base, f"{request.getfixturevalue('bucket')}/store" if is_remote else tmp_path / "store")
    newest = {f"{name}/_delta_log/{3:020d}.json" for name in TABLES}
    before = seen(files)

    class Behind(Stepwise):
        def list(self, folder, after):
            return (info for info in self._backend.list(folder, after) if info.path not in newest)

    files.backend = Behind(files.backend, lambda name, path: None)
    assert RecordTable(files, "items").version == 2, "so that the test can fail"
    assert seen(files) == before
    with write_lock(files):
        finish_publication(files)
        publish_refresh(files, row("new.jpg"))
    assert set(vectors_now(files)) == {*FIRST_ROWS, "c.jpg", "new.jpg"}
    assert (read_current(files).embeddings, read_current(files).items) == (4, 4)
    with write_lock(files):
        rollback(files, before.current.run_id, no_index)
    now = seen(files)
    assert now.rows == before.rows
    assert before.versions.items() <= now.versions.items()


@pytest.mark.medium
@pytest.mark.parametrize("is_remote", [False, True])
def test_the_number_of_a_deleted_index_is_never_used_again(tmp_path, request, monkeypatch, is_remote):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = new_store(f"{request.getfixturevalue('bucket')}/store" if is_remote else tmp_path / "store")
    publish_refresh(files, row("a.jpg"))
    assert build_store_index(files)[0] == 1

    def dying_swap(files, number):
        raise Killed

    for number in (2, 3):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(keep_index, "swap_index", dying_swap)
            build_store_index(files)
        vacuum(files, keep_days=0, keep_versions=1)
        assert f"{number:06d}" not in {info.path.split("/")[1] for info in files.list("index")}
        assert read_current(files).last_index == {"": number}
        publish_refresh(files, row(f"{number}.jpg"))
        assert read_current(files).last_index == {"": number}
    assert build_store_index(files)[0] == 4
    if files.folder is not None:
        assert 4 in list_versions(files.folder / "index")


@pytest.mark.parametrize("clean_up", [OPERATIONS["vacuum"], purge_of("ours.jpg")])
def test_files_that_were_never_finished_go_at_a_vacuum_and_a_purge(base, tmp_path, clean_up):
    files = copied(base, tmp_path / "store")
    run_id = read_current(files).run_id
    paths = [
        f"items/part-{run_id}-0001-aaaa-000000.parquet#1f",
        "embeddings/_delta_log/00000000000000000004.json#00ff",
        f"runs/{run_id}/run.json#a",
        "models/tags/store.json#b0",
        "CURRENT.json#1234abcd",
    ]
    for path in paths:
        (files.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (files.folder / path).write_bytes(b"half of ours.jpg")
    before = seen(files)
    assert carried_out(files, clean_up) is None
    assert not [info.path for info in files.list("") if "#" in info.path]
    assert seen(files).current.run_id >= before.current.run_id
    assert scan_store(files, ItemNames({"ours.jpg"})).num_files > 0


def test_a_list_of_deletions_that_was_never_named_goes_at_the_next_vacuum_and_what_it_names_stays(base, tmp_path):
    files = copied(base, tmp_path / "store")
    (part,) = [info.path for info in files.list("items") if info.path.endswith(".parquet")][:1]
    orphan = "deletions/0123456789abcdef.json"
    files.write(orphan, f'["{part}"]'.encode())
    vacuum(files)
    assert not files.exists(orphan)
    assert files.exists(part)
    assert seen(files).versions == seen(base).versions


@pytest.mark.parametrize("path", ["../mine.txt", "items/../../mine.txt"])
def test_a_list_of_deletions_leads_nowhere_out_of_the_store(base, tmp_path, path):
    files, mine = copied(base, tmp_path / "store"), tmp_path / "mine.txt"
    mine.write_text("mine")
    move_current(files, read_current(files), [path])
    (name,) = read_current(files).deleting
    with pytest.raises(StoreError, match=f"{name}.json: damaged, a list of paths in the store is due; delete it, and"):
        finish_publication(files)
    assert mine.read_text() == "mine"
    errors = [each.place for each in check_store(files).findings if each.severity == "error"]
    assert errors == [f"deletions/{name}.json"]
    files.delete(f"deletions/{name}.json")
    assert finish_publication(files) is None


def test_what_is_about_to_be_deleted_counts_as_deleted(base, tmp_path):
    files = copied(base, tmp_path / "store")
    first = publications(files)[0].run_id
    doomed = StoreFiles(files.address)

    def dies_at_the_first_deletion(name: str, path: str) -> None:
        if name == "delete":
            raise Killed

    doomed.backend = Stepwise(doomed.backend, dies_at_the_first_deletion)
    with pytest.raises(Killed):
        OPERATIONS["vacuum"](doomed)
    assert [run.can_be_read for run in past_runs(files)] == [False, False, True]
    with pytest.raises(StoreError, match="can't be read any more"):
        rollback(files, first, no_index)
    delete_listed(files)
    assert [run.can_be_read for run in past_runs(files)] == [False, False, True]
    assert list(files.list("deletions")) == []
