"""Each model of a store has an index of its own: built, updated, gone back from; one without vectors has none."""

import numpy as np
import pyarrow as pa
import pytest
from index_stores import indexed_store, item, vector_of
from model_stores import add_model, files_of, label_row, vector_row
from store_states import build_store_index

from embedder.errors import StoreError
from embedder.plugins.maintain.vacuum import vacuum
from embedder.retrieval.store_api import open_store
from embedder.store.layout import PUBLISHED_FILE, Published, read_current, read_record, run_file
from embedder.store.lock import write_lock
from embedder.store.tables.models import model_files
from embedder.store_index.index_versions import list_manifests
from embedder.store_index.keep_index import rollback_index, update_store_index

NUMBERS = range(60)


def name_of(number: int) -> str:
    return item(number)["item_id"]


@pytest.fixture
def files(tmp_path):
    """A store with an index, and a further model `clip` without one, whose vectors are those of night 1."""
    files = indexed_store(tmp_path / "store", number=60)
    add_model(files, "clip", *(vector_row(name_of(each), vector_of(name_of(each), 1)) for each in NUMBERS))
    return files


def found_by(files, number: int, night: int) -> str:
    """Nearest item of `clip` to the vector of an item."""
    store = open_store(files.address, model="clip")
    return store.search(vector_of(name_of(number), night), k=1)[0].item_id


def test_the_index_of_a_further_model_lies_in_its_folder_and_leaves_the_main_one_as_it_is(files):
    before, main = files_of(files), read_current(files)
    number, manifest = build_store_index(files, model="clip")
    after = files_of(files)
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    assert changed == {"CURRENT.json", run_file(main.run_id, PUBLISHED_FILE)}
    current = read_current(files)
    assert (number, current.index, current.models["clip"].index) == (1, main.index, 1)
    assert (manifest.num_vectors, manifest.model_fingerprint) == (60, "fingerprint of clip")
    store = open_store(files.address, model="clip")
    assert store.version == f"{current.run_id}/clip index 1"
    assert found_by(files, 7, night=1) == name_of(7)


def test_an_update_adds_what_the_model_has_got_since(files):
    build_store_index(files, model="clip", kind="hnsw")
    add_model(files, "clip", vector_row("new.jpg", vector_of("new.jpg", 1)))
    assert open_store(files.address, model="clip").current.index == 1
    with write_lock(files):
        assert update_store_index(model_files(files, "clip")) == 2
    assert open_store(files.address, model="clip").search(vector_of("new.jpg", 1), k=1)[0].item_id == "new.jpg"
    assert read_current(files).index == 1, "the main model's"


def test_a_rollback_of_the_index_goes_back_to_the_one_before_and_the_record_keeps_both(files):
    build_store_index(files, model="clip", kind="flat")
    build_store_index(files, model="clip", kind="hnsw")
    view = model_files(files, "clip")
    with write_lock(files):
        number, manifest = rollback_index(view)
    assert (number, manifest.kind, read_current(view).index) == (1, "flat", 1)
    record = read_record(files, run_file(read_current(files).run_id, PUBLISHED_FILE), Published)
    assert record.models["clip"].index == 1
    assert set(record.past_model_indexes["clip"]) == {2}
    vacuum(files, keep_days=0.0, keep_versions=1)
    assert [number for number, _ in list_manifests(view)] == [1, 2], "one to go back to stays"


def test_indexes_of_further_models_that_nothing_needs_are_vacuumed(files):
    for kind in ("flat", "hnsw", "flat"):
        build_store_index(files, model="clip", kind=kind)
    vacuum(files, keep_days=0.0, keep_versions=1)
    assert [number for number, _ in list_manifests(model_files(files, "clip"))] == [2, 3]
    assert found_by(files, 3, night=1) == name_of(3)


def test_a_model_without_vectors_and_an_unknown_one_get_no_index(files):
    add_model(files, "labels", label_row(name_of(0)), has_vectors=False, top=pa.array(["cat"]))
    with pytest.raises(StoreError, match=r"model labels has no vectors to compare, it gives labels\.top \(string\)"):
        build_store_index(files, model="labels")
    with pytest.raises(StoreError, match="no model 'nothing' is published in it; it has main, clip, labels"):
        build_store_index(files, model="nothing")
    with pytest.raises(StoreError, match="has no vectors"), write_lock(files):
        update_store_index(model_files(files, "labels"))
    with pytest.raises(StoreError, match=r"embedder index build --store .* --model clip"), write_lock(files):
        update_store_index(model_files(files, "clip"))


def test_an_earlier_publication_whose_index_was_vacuumed_is_searched_exactly(files):
    build_store_index(files, model="clip")
    run_id = read_current(files).run_id
    build_store_index(files, model="clip", kind="hnsw")
    build_store_index(files, model="clip", kind="flat")
    store = open_store(files.address, model="clip", version=run_id)
    assert np.isclose(store.search(vector_of(name_of(5), 1), k=1)[0].score, 1.0, atol=1e-5)
