"""A store that an earlier release made is opened, searched and refreshed by this one, and nothing is embedded again.

`data/store_format_2.tar.gz` was made by the release before the folders of `embedder` were renamed: 12 drawings made
in code and their captions under `photos/in`, a model of random weights, one run, one index.
"""

from pathlib import Path

import pytest
from old_stores import unpack_store

import embedder

EARLIER = Path(__file__).parent / "data" / "store_format_2.tar.gz"


@pytest.fixture
def photos(tmp_path):
    unpack_store(EARLIER, tmp_path)
    return tmp_path / "photos"


def test_it_is_searched_as_it_was(photos):
    store = embedder.open_store(str(photos / "store"), model=str(photos / "model"))
    hits = store.search("a red house", k=3)
    assert [hit.item_id for hit in hits] == ["pictures/0008.png", "pictures/0000.png", "pictures/0005.png"]
    assert [hit.score for hit in hits] == pytest.approx([-0.2029, -0.2553, -0.2631], abs=1e-3)
    assert store.to_arrow().num_rows == 12


@pytest.mark.medium
def test_a_refresh_embeds_what_is_new_and_keeps_the_rest(photos):
    settings = {"model": str(photos / "model"), "store": str(photos / "store"), "engine": "local"}
    config = embedder.load_config(overrides=settings | {"source": [{"path": str(photos / "in")}]})
    before = embedder.open_store(config.store).to_arrow().select(["item_id", "image_embedding"]).to_pylist()
    report = embedder.refresh(config)
    # The files were copied here after the store was made, and its records have no change times: they are read once.
    assert (report.num_vectors, report.num_new, report.num_equal) == (0, 0, 12)
    report = embedder.refresh(config)
    assert (report.num_vectors, report.num_new, report.num_unchanged) == (0, 0, 12)
    (photos / "in" / "pictures" / "0012.png").write_bytes((photos / "in" / "pictures" / "0003.png").read_bytes())
    assert embedder.refresh(config).num_vectors == 1
    store = embedder.open_store(config.store)
    after = {row["item_id"]: row["image_embedding"] for row in store.to_arrow().to_pylist()}
    assert len(after) == 13
    assert all(after[row["item_id"]] == row["image_embedding"] for row in before)
    assert store.current.index == 2
