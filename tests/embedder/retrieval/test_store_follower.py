"""A service's store continues with what is published later, and serves the old as long as the new can't be opened."""

import gc
import threading
from pathlib import Path

import numpy as np
import pytest
import samples
from model_runs import other_towers
from refresh_runs import refreshed
from store_samples import row
from store_states import build_store_index, new_store, publish_refresh

import embedder
from embedder.errors import StoreError
from embedder.plugins.maintain.vacuum import vacuum
from embedder.retrieval.store_follower import MAX_DOUBLINGS
from embedder.store.files import StoreFiles
from embedder.store.layout import CURRENT_FILE, read_current
from index.index_errors import RetrievalError

QUERY = np.array([1.0, 0.0], np.float32)
NEVER_S = 3600.0


@pytest.fixture
def files(tmp_path):
    files = new_store(tmp_path / "store")
    publish_refresh(files, row("a.jpg", caption="old"))
    build_store_index(files)
    return files


@pytest.fixture
def follow(files):
    """Opens a store that looks only when it is told to."""
    opened = []

    def open_it(**options):
        opened.append(embedder.follow_store(files.address, every_s=NEVER_S, **options))
        return opened[-1]

    yield open_it
    for store in opened:
        store.close()


def captions(hits) -> list:
    return [hit.caption for hit in hits]


def break_index(files, number: int) -> bytes:
    """Cut the file of an index short; gives what it held."""
    path = files.folder / "index" / f"{number:06d}" / "index.faiss"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    return content


def test_hits_name_the_publication_and_the_index_that_answered(files, follow):
    store = follow()
    run_id = read_current(files).run_id
    assert store.search(QUERY).version == f"{run_id}/index 1"
    build_store_index(files)
    assert store.look()
    assert store.search(QUERY).version == f"{run_id}/index 2"
    publish_refresh(files, row("a.jpg", caption="new", modified="t1"))
    assert store.look()
    hits = store.search(QUERY)
    assert (captions(hits), hits.version) == (["new"], f"{read_current(files).run_id}/exact")
    assert not store.look(), "nothing is new"


def test_who_follows_is_told_of_each_later_publication_once_it_is_served(files, follow):
    snapshots = []
    store = follow(on_change=snapshots.append)
    assert not store.look()
    build_store_index(files)
    assert store.look()
    assert snapshots == [store.snapshot]


def test_what_is_open_answers_from_its_own_version_though_a_vacuum_took_its_files(files, follow):
    store = follow()
    snapshot = store.snapshot
    for count in range(2):
        publish_refresh(files, row("a.jpg", caption="new", modified=f"t{count}"))
    vacuum(files, keep_days=0, keep_versions=1)
    assert captions(store.search(QUERY)) == ["old"], "before it has looked"
    store.look()
    assert (captions(snapshot.search(QUERY)), captions(store.search(QUERY))) == (["old"], ["new"])


def test_conditions_that_queries_used_are_answered_by_the_next_version_though_its_files_are_gone(files, follow):
    store = follow()
    condition = {"where": "modality = 'image'"}
    assert captions(store.search(QUERY, **condition)) == ["old"]
    publish_refresh(files, row("a.jpg", caption="new", modified="t1"))
    assert store.look()
    for count in range(2):
        publish_refresh(files, row("a.jpg", caption="newer", modified=f"later {count}"))
    vacuum(files, keep_days=0, keep_versions=1)
    assert captions(store.search(QUERY, **condition)) == ["new"]


def test_a_damaged_version_is_not_served_and_told_once_until_it_is_whole(files, follow):
    errors = []
    store = follow(on_error=errors.append)
    build_store_index(files)
    content = break_index(files, 2)
    assert [store.look(), store.look()] == [False, False]
    assert [type(error) for error in errors] == [RetrievalError]
    assert store.last_error is not None
    assert store.search(QUERY).version.endswith("/index 1")
    (files.folder / "index" / "000002" / "index.faiss").write_bytes(content)
    assert store.look()
    assert (store.last_error, store.search(QUERY).version[-7:]) == (None, "index 2")


@pytest.mark.parametrize("damage", [b"", b"{", None])
def test_a_damaged_or_missing_current_json_leaves_the_old_version_served(files, follow, damage):
    store = follow()
    files.delete(CURRENT_FILE) if damage is None else files.write(CURRENT_FILE, damage)
    assert not store.look()
    assert isinstance(store.last_error, StoreError)
    assert captions(store.search(QUERY)) == ["old"]


def test_what_fails_is_tried_again_ever_more_seldom(files, follow):
    store = follow()
    build_store_index(files)
    break_index(files, 2)
    waits = []
    for _ in range(MAX_DOUBLINGS + 2):
        store.look()
        waits.append(store.wait_s / NEVER_S)
    assert waits == [2, 4, 8, 16, 32, 32, 32]
    build_store_index(files)
    assert store.look()
    assert store.wait_s == NEVER_S


def test_a_store_that_cannot_be_opened_at_first_is_an_error(files):
    break_index(files, 1)
    with pytest.raises(RetrievalError):
        embedder.follow_store(files.address)
    assert not followers()


def test_closed_or_forgotten_it_leaves_no_thread(files):
    with embedder.follow_store(files.address, every_s=0.01):
        assert len(followers()) == 1
    assert not followers()
    forgotten = embedder.follow_store(files.address, every_s=0.01)
    (thread,) = followers()
    del forgotten
    gc.collect()
    thread.join(timeout=30)
    assert not thread.is_alive()


def followers() -> list:
    return [thread for thread in threading.enumerate() if thread.name == "follow-store"]


def test_it_looks_by_itself(files):
    with embedder.follow_store(files.address, every_s=0.01) as store:
        arrived = threading.Event()
        build_store_index(files)
        for _ in range(3000):
            if store.version.endswith("/index 2"):
                arrived.set()
                break
            threading.Event().wait(0.01)
        assert arrived.is_set()


def test_a_callback_that_fails_ends_no_following(files, caplog):
    served, seen = [], threading.Event()

    def fail_once(snapshot):
        served.append(snapshot)
        if len(served) == 1:
            raise RuntimeError("the metrics server is away")
        seen.set()

    with embedder.follow_store(files.address, every_s=0.01, on_change=fail_once) as store:
        build_store_index(files)
        while not served:
            seen.wait(0.01)
        build_store_index(files)
        assert seen.wait(30)
        assert store.snapshot == served[-1]
    assert "the metrics server is away" in caplog.text


@pytest.mark.medium
def test_texts_are_encoded_by_the_model_of_the_publication_that_answers(make_run, tmp_path):
    source = samples.folder(tmp_path / "in")
    config = make_run(source)
    refreshed(config)
    newer = Path(other_towers(tmp_path / "newer"))
    with embedder.follow_store(config.store, every_s=NEVER_S) as store:
        answers = [scored(store.search("a red car", k=3))]
        encoder = store.encoder
        build_store_index(StoreFiles(config.store))
        assert store.look()
        assert store.encoder is encoder, "the same model is not loaded twice"

        refreshed(make_run(source, model=str(newer)))
        towers = Path(config.store) / "query_towers"
        newer.rename(tmp_path / "moved")
        towers.rename(tmp_path / "towers")
        assert not store.look(), "a model that can't be loaded is found out before a query is"
        assert "newer" in str(store.last_error)
        answers.append(scored(store.search("a red car", k=3)))

        (tmp_path / "towers").rename(towers)
        assert store.look(), "the query towers need no model folder"
        answers.append(scored(store.search("a red car", k=3)))
    alone = embedder.open_store(config.store)
    assert alone.info.model == str(newer)
    assert answers[0] == answers[1] != answers[2] == scored(alone.search("a red car", k=3))


def scored(hits) -> list:
    return [(hit.item_id, round(hit.score, 5)) for hit in hits]
