"""After a purge no index file holds an item: neither its id nor its vectors, masked or not."""

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import count

import numpy as np
import pytest
from index_stores import NO_FIRST_INDEX, indexed_run, indexed_store, item
from store_samples import INFO
from store_states import Killed, build_store_index, dying, set_clock

from embedder.config_toml.sections import IndexConfig
from embedder.plugins.maintain.purge.purge import Purge
from embedder.plugins.maintain.purge.purge import purge as run_purge
from embedder.plugins.maintain.purge.purge_plan import plan_purge
from embedder.plugins.maintain.vacuum import vacuum
from embedder.retrieval.store_api import open_store
from embedder.store.files import StoreFiles
from embedder.store.layout import read_current
from embedder.store.maintenance.compact import compact
from embedder.store.maintenance.half_precision import is_half_store
from embedder.store.maintenance.rollback import rollback
from embedder.store_index.keep_index import index_choice, update_store_index

ITEM = item(50)
ID = ITEM["item_id"]


def purge(files: StoreFiles, *ids: str) -> Purge:
    return run_purge(files, ids, index_choice(files, reuse=False))


def traces(files: StoreFiles, one: dict) -> list[str]:
    """Files of indexes that hold the item's id or one of its vectors."""
    vectors = (one[name] for name in ("image_embedding", "text_embedding") if one[name])
    wanted = [one["item_id"].encode(), *(np.array(vector, np.float32).tobytes() for vector in vectors)]
    return [info.path for info in files.list("index") if any(each in files.read(info.path) for each in wanted)]


def test_the_index_is_rebuilt_without_the_item_and_older_ones_go(tmp_path):
    files = indexed_store(tmp_path / "store", kind="hnsw")
    indexed_run(files, item(300))
    assert traces(files, ITEM), "so that the test can fail"
    purge(files, ID)
    assert traces(files, ITEM) == []
    assert open_store(files.address).search(np.array(ITEM["image_embedding"], np.float32), 1)[0].item_id != ID


@pytest.mark.medium
def test_an_item_that_left_before_and_is_masked_goes_too_and_what_is_published_stays_searchable(tmp_path):
    files = indexed_store(tmp_path / "store", kind="hnsw")
    indexed_run(files, retired=[ID])
    current = read_current(files)
    assert any(path.startswith(f"index/{current.index:06d}/") for path in traces(files, ITEM)), "masked, not gone"
    done = purge(files, ID)
    assert (done.plan.num_published, done.published is not None) == (0, True)
    assert traces(files, ITEM) == []
    assert read_current(files).index > current.index
    assert len(open_store(files.address).search(np.array(ITEM["image_embedding"], np.float32), 500)) == 199
    assert update_store_index(files) == read_current(files).index, "and holds what is published"


@pytest.mark.medium
def test_an_index_in_parts_goes_with_the_versions_that_share_a_part_with_it(tmp_path):
    design = "IVF2,PQ8x4fs,Disk(SQ8)"
    files = indexed_store(tmp_path / "store", kind=design)
    indexed_run(files, item(300), config=IndexConfig(kind=design))
    held = {path for path in traces(files, ITEM) if path.endswith(".arrow")}
    assert held == {"index/000001/ids-000000.arrow", "index/000002/ids-000000.arrow"}
    purge(files, ID)
    assert traces(files, ITEM) == []
    assert not [info.path for info in files.list("index") if info.path.endswith((".codes", ".arrow"))]
    assert open_store(files.address).search(np.array(item(300)["image_embedding"], np.float32), 1)[0].item_id != ID


@pytest.mark.medium
def test_killed_between_any_two_steps_what_is_published_can_be_searched_and_the_same_command_ends_it(
    tmp_path, monkeypatch
):
    store = tmp_path / "store"
    for number in count(0, 2):
        files = indexed_store(store / str(number), number=20, kind="flat")
        indexed_run(files, retired=["0003.jpg"])
        masked = item(3)
        with dying(monkeypatch, number) as made, suppress(Killed):
            purge(files, "0003.jpg")
        assert len(open_store(files.address).search(np.array(ITEM["image_embedding"], np.float32), 50)) == 19
        purge(files, "0003.jpg")
        assert traces(files, masked) == []
        assert len(open_store(files.address).search(np.array(ITEM["image_embedding"], np.float32), 50)) == 19
        if len(made) < number:
            break
    assert len(made) >= 6, "the reminder, the run, the record, the swap, and what is deleted"


def test_the_vector_of_a_caption_without_a_picture_goes_too(tmp_path):
    files = indexed_store(tmp_path / "store", number=20)
    words = item(50, image_embedding=None, modality="text")
    indexed_run(files, words)
    build_store_index(files)
    held = traces(files, words)
    assert held and not any(path.endswith("ids.parquet") for path in held), "as a query that recall is measured on"
    purge(files, ID)
    assert traces(files, words) == []
    assert len(open_store(files.address).search(np.array(ITEM["image_embedding"], np.float32), 50)) == 20


def with_caption_in_index(folder) -> tuple[StoreFiles, dict]:
    """Store of rounded vectors, with an index from before that kept the exact one of a caption without a picture."""
    files, words = indexed_store(folder, number=20), item(50, image_embedding=None, modality="text")
    indexed_run(files, words)
    build_store_index(files)
    compact(files, vectors="float16")
    assert is_half_store(files, INFO.model_fingerprint)
    return files, words


def test_the_vector_of_a_caption_goes_though_the_table_has_it_only_in_half_precision(tmp_path, monkeypatch):
    files, words = with_caption_in_index(tmp_path / "store")
    set_clock(monkeypatch, lambda: datetime.now(UTC) + timedelta(days=30), files)
    vacuum(files, keep_days=7, keep_versions=1)
    assert traces(files, words), "so that the test can fail"
    purge(files, ID)
    assert traces(files, words) == []
    assert read_current(files).index is not None


def test_an_index_of_vectors_that_were_rounded_before_goes_too(tmp_path):
    files, words = with_caption_in_index(tmp_path / "store")
    build_store_index(files)
    rounded = words | {"text_embedding": np.float16(words["text_embedding"]).tolist()}
    assert traces(files, rounded) == [f"index/{read_current(files).index:06d}/queries.npz"]
    purge(files, ID)
    assert traces(files, rounded) == traces(files, words) == []


def test_queries_that_can_not_be_read_go_and_those_of_others_stay(tmp_path):
    files, words = indexed_store(tmp_path / "store", number=20), item(50, image_embedding=None, modality="text")
    indexed_run(files, words, config=NO_FIRST_INDEX)
    assert plan_purge(files, [ID]).indexes == frozenset()
    files.write("index/000001/queries.npz", files.read("index/000001/queries.npz")[:-100])
    assert plan_purge(files, [ID]).indexes == {"index/000001"}


def test_an_index_that_holds_nothing_of_the_item_stays(tmp_path):
    files = indexed_store(tmp_path / "store", number=20)
    words = item(50, image_embedding=None, text_embedding=None, modality="text")
    indexed_run(files, words)
    before = read_current(files).index
    purge(files, ID)
    assert read_current(files).index == before


@pytest.mark.medium
def test_older_versions_whose_index_held_it_are_searched_exactly_and_never_find_it(tmp_path):
    files = indexed_store(tmp_path / "store", number=20, kind="flat")
    indexed_run(files, ITEM)
    version = read_current(files).run_id
    indexed_run(files, item(60))
    vector = np.array(ITEM["image_embedding"], np.float32)
    assert open_store(files.address, version=version).search(vector, 1)[0].item_id == ID
    purge(files, ID)
    older = open_store(files.address, version=version)
    assert older.current.index is None
    found = older.search(vector, 50)
    assert len(found) == 20 and ID not in {hit.item_id for hit in found}
    rollback(files, version, index_choice(files))
    assert len(open_store(files.address).search(vector, 50)) == 20
    assert traces(files, ITEM) == []
