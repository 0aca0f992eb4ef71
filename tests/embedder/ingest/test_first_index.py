"""The first publication of a store makes its first index, so that search needs no other command."""

import numpy as np
import pytest
import samples
from embedding_runs import embedded
from index_stores import NO_FIRST_INDEX, indexed_run, item, vector_of
from refresh_runs import nightly_file, refreshed
from store_states import new_store

import embedder
from embedder.errors import RunFailedError
from embedder.ingest.embed import refresh
from embedder.ingest.work import IngestOptions
from embedder.retrieval.store_api import open_store
from embedder.store.files import StoreFiles
from embedder.store.layout import read_current
from embedder.store.publish.history import publications
from embedder.store.publish.publish import finish_publication
from embedder.store_index import build_or_update as index_making
from embedder.store_index import recall_queries as queries_module
from embedder.store_index.index_versions import list_manifests, manifest_of
from embedder.store_index.keep_index import index_builder


def assert_found_through_index(store: str, num_items: int):
    """Search goes through an index, which holds every picture and finds each by its own vector."""
    opened = embedder.open_store(store)
    assert opened.current.index is not None
    assert manifest_of(opened.files, opened.current.index).num_vectors == num_items
    rows = opened.to_arrow(["item_id", "image_embedding"]).to_pylist()
    for row in (row for row in rows if row["image_embedding"]):
        assert opened.search(np.array(row["image_embedding"], np.float32), 1)[0].item_id == row["item_id"]


@pytest.mark.parametrize("engine", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_search_follows_the_first_embed_without_another_command(make_run, tmp_path, run_embedder, engine):
    config = make_run(samples.folder(tmp_path / "in"))
    arguments = ("embed", tmp_path / "in", "--model", config.model, "--store", config.store)
    arguments += ("--engine", engine, "--stages", 1)
    code, _, stderr = run_embedder(*arguments)
    assert code == 0, stderr
    assert "index 1: built as Flat" in stderr
    code, found, _ = run_embedder("search", "a red car", "--store", config.store, "--json")
    assert (code, len(found["hits"])) == (0, 6)
    assert_found_through_index(config.store, 6)
    assert [each.index for each in publications(StoreFiles(config.store))] == [1]


@pytest.mark.medium
def test_the_first_refresh_makes_it_and_later_ones_keep_it_up_to_date(make_run, tmp_path):
    source = samples.folder(tmp_path / "in")
    config = make_run(source)
    refreshed(config)
    assert_found_through_index(config.store, 6)
    (source / "pictures" / "0100.png").write_bytes(samples.image_bytes(100))
    refreshed(config)
    assert_found_through_index(config.store, 7)
    assert read_current(StoreFiles(config.store)).index == 2


def test_all_settings_of_the_index_count_for_the_first_one(make_run, tmp_path):
    config = make_run(samples.folder(tmp_path / "in"), index={"kind": "hnsw", "recall": 0.97})
    embedded(config)
    (number, manifest) = list_manifests(StoreFiles(config.store))[0]
    assert (number, manifest.kind, manifest.target_recall) == (1, "hnsw", 0.97)


@pytest.mark.medium
def test_where_it_is_not_wanted_none_is_made_and_one_that_is_there_is_kept(make_run, tmp_path, run_embedder):
    source = samples.folder(tmp_path / "in")
    config = make_run(source)
    path, off = nightly_file(config), ("--set", "index.build=false")
    assert run_embedder("refresh", path, *off)[0] == 0
    assert read_current(StoreFiles(config.store)).index is None
    assert run_embedder("refresh", path, *off)[0] == 0, "nor does a night without a change make one"
    assert read_current(StoreFiles(config.store)).index is None
    assert len(embedder.open_store(config.store).search("a red car", k=3)) == 3
    assert run_embedder("index", "build", "--store", config.store)[0] == 0
    (source / "pictures" / "0100.png").write_bytes(samples.image_bytes(100))
    assert run_embedder("refresh", path, *off)[0] == 0
    assert_found_through_index(config.store, 7)


@pytest.mark.medium
def test_a_store_of_before_gets_its_first_index_in_a_night_without_a_change(make_run, tmp_path):
    config = make_run(samples.folder(tmp_path / "in"))
    refreshed(make_run(tmp_path / "in", index={"build": False}))
    before = read_current(StoreFiles(config.store))
    report, _ = refreshed(config)
    assert (report.run_id, report.outcome) == (None, "nothing to embed; index 1 is made")
    assert read_current(StoreFiles(config.store)) == before.model_copy(update={"index": 1})
    assert refreshed(config)[0].outcome == "nothing to do"
    assert_found_through_index(config.store, 6)


def test_where_there_are_only_captions_there_is_no_index_and_one_line_says_so(make_run, tmp_path, said):
    source = tmp_path / "in"
    source.mkdir()
    for number, sentence in enumerate(samples.SENTENCES[:5]):
        (source / f"{number}.txt").write_text(sentence)
    report = refresh(make_run(source, captions={"alone": True}), IngestOptions(kind="refresh"))
    assert report.published
    assert [line for line in said if "index" in line] == ["no index: no image or video is among what is published"]
    assert read_current(StoreFiles(make_run(source).store)).index is None


def test_a_few_pictures_load_no_model_for_their_index(make_run, tmp_path, monkeypatch):
    def no_model(uri):
        raise AssertionError("the model is loaded to make queries")

    monkeypatch.setattr(queries_module, "open_model", no_model)
    config = make_run(samples.folder(tmp_path / "in", captions=False))
    embedded(config)
    (_, manifest) = list_manifests(StoreFiles(config.store))[0]
    assert (manifest.design, manifest.recall_query_kind, manifest.recall_at_10) == ("Flat", "sampled", 1.0)


@pytest.mark.parametrize("many, asked", [(10, False), (2, True)])
def test_many_pictures_or_a_wish_for_more_than_exact_search_are_judged_with_what_people_ask(
    tmp_path, monkeypatch, many, asked
):
    loaded = []
    monkeypatch.setattr(queries_module, "_texts", loaded.append)
    monkeypatch.setattr(index_making, "FEW_VECTORS", many)
    files = new_store(tmp_path / "store")
    indexed_run(files, *(item(number, text_embedding=None, caption=None) for number in range(5)))
    assert bool(loaded) is asked


@pytest.mark.medium
def test_constraints_that_nothing_keeps_publish_nothing_and_lose_nothing(make_run, tmp_path, run_embedder):
    source = samples.folder(tmp_path / "in")
    config = make_run(source)
    arguments = ("embed", source, "--model", config.model, "--store", config.store, "--engine", "local")
    code, _, stderr = run_embedder(*arguments, "--set", "index.memory_bytes=64")
    assert code == 1
    last = stderr.strip().splitlines()[-1]
    assert "index.memory_bytes = 64" in last and "--set index.build=false" in last and "is kept" in last
    files = StoreFiles(config.store)
    assert (read_current(files), list_manifests(files)) == (None, [])
    code, report, stderr = run_embedder(*arguments, "--set", "index.build=false", "--json")
    assert code == 0, stderr
    assert "the last publication was cut off; now it is whole" in stderr
    assert (report["num_unchanged"], read_current(files).index) == (6, None), "no item is embedded again"


def test_memory_that_is_too_small_is_told_in_one_line_with_the_way_out(tmp_path, monkeypatch):
    def no_memory(*arguments, **options):
        raise MemoryError("std::bad_alloc")

    monkeypatch.setattr("index.build.build_index", no_memory)
    files = new_store(tmp_path / "store")
    with pytest.raises(RunFailedError, match=r"memory is too small .*bad_alloc.*index\.build=false") as failure:
        indexed_run(files, item(1))
    assert "\n" not in str(failure.value)
    assert read_current(files) is None
    finish_publication(files, index_builder(NO_FIRST_INDEX))
    assert len(open_store(files.address).search(vector_of("query"), 5)) == 1
