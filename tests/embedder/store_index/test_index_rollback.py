"""An earlier index of the same rows is published again; one of other rows is not, and old ones stay for their time."""

import json
import re
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from store_samples import row
from store_states import Killed, build_store_index, new_store, no_index, publish_refresh, record, set_clock
from typer.testing import CliRunner

from embedder.cli import app
from embedder.errors import StoreError
from embedder.plugins.maintain.vacuum import needed_indexes, vacuum
from embedder.retrieval.store_api import open_store
from embedder.store.files import StoreFiles
from embedder.store.layout import read_current
from embedder.store.maintenance.compact import PartTarget, compact
from embedder.store.maintenance.rollback import rollback
from embedder.store.publish.history import publications
from embedder.store_index import keep_index
from embedder.store_index.index_versions import fetched_manifest, list_manifests
from embedder.store_index.keep_index import rollback_index
from index.index_errors import RetrievalError

QUERY = np.array([0.0, 1.0], np.float32)


@pytest.fixture
def files(tmp_path):
    files = new_store(tmp_path / "store")
    publish_refresh(files, row("a.jpg"), row("b.jpg", image_embedding=[0.0, 1.0]))
    publish_refresh(files, row("c.jpg"))
    return files


def index_folders(files) -> set[int]:
    return {int(info.path.split("/")[1]) for info in files.list("index")}


def test_the_one_before_is_published_again_and_undone_by_its_number(files):
    build_store_index(files, kind="flat")
    build_store_index(files, kind="hnsw")
    rows = read_current(files).model_dump(exclude={"index"})
    number, manifest = rollback_index(files)
    assert (number, manifest.kind, read_current(files).index) == (1, "flat", 1)
    store = open_store(files.address)
    assert [hit.item_id for hit in store.search(QUERY, 1)] == ["b.jpg"]
    assert publications(files)[-1].index == 1, "history says the same"
    assert rollback_index(files, 2)[0] == read_current(files).index == 2
    assert read_current(files).model_dump(exclude={"index"}) == rows, "nothing but the index changes"


def test_each_rollback_goes_one_further_back(files):
    for _ in range(3):
        build_store_index(files)
    assert [rollback_index(files)[0] for _ in range(2)] == [2, 1]
    with pytest.raises(StoreError, match="embedder rollback --store"):
        rollback_index(files)


def test_an_old_version_that_can_not_be_read_bars_no_other(files, caplog):
    for _ in range(3):
        build_store_index(files)
    (files.folder / "index" / "000001" / "manifest.json").write_text("{")
    status = CliRunner().invoke(app, ["index", "status", "--store", files.address, "--json"])
    assert status.exit_code == 0, status.output
    assert "index version 1 can't be read, and is left out: " in caplog.text
    assert rollback_index(files)[0] == 2
    with pytest.raises(StoreError, match="embedder rollback --store"):
        rollback_index(files)


def test_a_version_that_goes_while_they_are_listed_bars_no_other(files, monkeypatch):
    for _ in range(2):
        build_store_index(files)
    read = StoreFiles.read

    def read_others(self, path, *arguments):
        if path == "index/000001/manifest.json":
            raise FileNotFoundError(path)
        return read(self, path, *arguments)

    monkeypatch.setattr(StoreFiles, "read", read_others)
    assert [number for number, _ in list_manifests(files)] == [2]


def test_a_damaged_manifest_is_told_by_its_place_in_the_store(files):
    build_store_index(files)
    files.write("index/000001/manifest.json", b"{")
    with pytest.raises(RetrievalError, match=f"^{re.escape(files.uri('index/000001/manifest.json'))}: "):
        fetched_manifest(files, 1)


def test_where_no_earlier_index_is_of_these_rows_the_way_back_for_both_is_named(files):
    build_store_index(files)
    old = read_current(files).run_id
    publish_refresh(files, row("d.jpg"))
    build_store_index(files)
    with pytest.raises(StoreError, match=f"embedder rollback --store {files.address}"):
        rollback_index(files)
    with pytest.raises(StoreError, match=f"embeddings version 2, .* `embedder rollback {old}"):
        rollback_index(files, 1)
    rollback(files, old, lambda candidate: candidate.index)
    assert read_current(files).index == 1


def test_a_version_that_is_not_there_published_already_or_damaged_is_refused(files):
    build_store_index(files)
    build_store_index(files)
    with pytest.raises(StoreError, match="index version 7 is not there"):
        rollback_index(files, 7)
    with pytest.raises(StoreError, match="is what is published now"):
        rollback_index(files, 2)
    path = files.folder / "index" / "000001" / "index.faiss"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RetrievalError, match="altered or cut short"):
        rollback_index(files)
    assert read_current(files).index == 2


def test_a_compaction_and_a_rollback_of_the_rows_keep_the_way_back(files):
    build_store_index(files)
    build_store_index(files)
    with_two = read_current(files).run_id
    before = read_current(files).embeddings
    compact(files, PartTarget())
    assert read_current(files).embeddings == before + 1
    assert rollback_index(files)[0] == 1
    publish_refresh(files, row("d.jpg"))
    rollback(files, with_two, no_index)
    assert rollback_index(files)[0] == 2, "search was exact, and the newest of these rows is taken"


def test_from_the_command_line_it_says_what_is_published(files):
    store = ("--store", str(files.address))
    runner = CliRunner()
    build_store_index(files, kind="flat")
    build_store_index(files, kind="hnsw")
    done = runner.invoke(app, ["index", "rollback", *store, "--json"])
    assert json.loads(done.stdout.splitlines()[-1])["index"] == 1
    status = json.loads(runner.invoke(app, ["index", "status", *store, "--json"]).stdout.splitlines()[-1])
    assert [(each["index"], each["published"]) for each in status["versions"]] == [(1, True), (2, False)]
    assert "published again: index 2: HNSW" in runner.invoke(app, ["index", "rollback", "--to", "2", *store]).stdout
    assert isinstance(runner.invoke(app, ["index", "rollback", "--to", "9", *store]).exception, StoreError)


def test_a_replaced_index_stays_for_its_time_however_old_its_publication_is(files, monkeypatch):
    now = datetime.now(UTC)

    def build_at(days: float) -> None:
        set_clock(monkeypatch, lambda: now + timedelta(days=days), files)
        build_store_index(files)

    for days in (0, 1, 20, 25):
        build_at(days)
    set_clock(monkeypatch, lambda: now + timedelta(days=26), files)
    vacuum(files)
    assert index_folders(files) == {2, 3, 4}, "the first was replaced 25 days ago, the second six, the third one"
    assert [rollback_index(files)[0] for _ in range(2)] == [3, 2]
    rollback_index(files, 4)
    set_clock(monkeypatch, lambda: now + timedelta(days=90), files)
    vacuum(files)
    assert len(index_folders(files)) == 2, "the published one, and one to go back to"
    assert rollback_index(files)[0]


def test_an_index_whose_build_died_before_the_swap_goes_after_its_time(files, monkeypatch):
    build_store_index(files)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(keep_index, "swap_index", dying_swap)
        build_store_index(files)
    vacuum(files)
    assert (index_folders(files), read_current(files).index) == ({1, 2}, 1)
    set_clock(monkeypatch, lambda: datetime.now(UTC) + timedelta(days=8), files)
    vacuum(files)
    assert index_folders(files) == {1}


def dying_swap(files, number):
    raise Killed


def test_which_indexes_stay_is_arithmetic():
    day = datetime(2026, 3, 10, tzinfo=UTC)
    past = {number: day - timedelta(days=ago) for number, ago in ((1, 20), (2, 9), (3, 8))}
    old = record("1").model_copy(update={"index": 4, "past_indexes": past})
    new = record("2").model_copy(update={"index": 6, "past_indexes": {5: day - timedelta(days=1)}})
    week = day - timedelta(days=7)
    assert needed_indexes([old, new], [new], week) == {5, 6}
    assert needed_indexes([old, new], [old, new], week) == {3, 4, 5, 6}
    assert needed_indexes([old, new], [new], day - timedelta(days=10)) == {2, 3, 5, 6}
    assert needed_indexes([old, new], [new], day) == {5, 6}, "one to go back to stays without any grace"
