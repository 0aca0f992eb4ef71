"""A table or a tar that was rewritten: equal items keep vector and run, and point to where they lie now."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import samples
from refresh_runs import refreshed

import embedder
from embedder.media.sandbox import SandboxedDecoder
from embedder.retrieval.hit import THUMBNAIL
from embedder.store.files import StoreFiles
from embedder.store.tables.tables import RecordTable

pytestmark = pytest.mark.medium


def write_table(path, skus, **columns):
    """A catalogue with one picture a SKU, seeded by it; other columns by name."""
    pictures = pa.array([samples.image_bytes(sku) for sku in skus], pa.binary())
    pq.write_table(pa.table({"sku": pa.array(skus), "photo": pictures, **columns}), path, row_group_size=4)


@pytest.fixture
def catalogue(make_run, tmp_path):
    path = tmp_path / "catalogue.parquet"
    columns = {"id": "sku", "image": "photo"}

    def configure(*carryover):
        return make_run([{"path": str(path), "columns": columns, "carryover": list(carryover)}], rows_per_part=4)

    return path, configure


def assert_same_vectors(before, after, keys):
    for key in keys:
        for name in ("image_embedding", "run_id", "embedded_at", "content_version"):
            assert after[key][name] == before[key][name]


def test_rows_of_a_table_that_was_written_anew_are_found_at_their_new_places(catalogue):
    path, configure = catalogue
    config = configure()
    write_table(path, list(range(20)))
    _, before = refreshed(config)
    write_table(path, [99, *range(1, 20)][::-1])  # 0 is gone, 99 is new, all others lie elsewhere
    report, after = refreshed(config)
    assert (report.num_equal, report.num_new, report.num_retired, report.num_vectors) == (19, 1, 1, 1)
    assert {key[0] for key in after} == {str(sku) for sku in (*range(1, 20), 99)}
    assert_same_vectors(before, after, [(str(sku), 0) for sku in range(1, 20)])
    store = embedder.open_store(config.store)
    for sku in (1, 7, 19):
        hit = store.search(np.array(before[str(sku), 0]["image_embedding"], np.float32), k=1)
        (shown,) = hit.thumbnails()
        assert hit[0].item_id == str(sku)
        assert hit[0].uri != before[str(sku), 0]["uri"]
        assert np.array_equal(shown, thumbnail_of(samples.image_bytes(sku))), "the picture there is the item's own"


def thumbnail_of(data):
    with SandboxedDecoder() as sandbox:
        return sandbox.image(data, THUMBNAIL)


def test_carried_columns_of_equal_items_are_brought_up_to_date_without_the_model(catalogue):
    path, configure = catalogue
    config = configure("price", "tags")
    skus = list(range(12))
    tags = pa.array([[f"tag {sku}"] for sku in skus])
    write_table(path, skus, price=pa.array([float(sku) for sku in skus]), tags=tags)
    _, before = refreshed(config)
    prices = [99.5 if sku == 5 else float(sku) for sku in skus]
    write_table(path, skus, price=pa.array([None, *prices[1:]]), tags=tags)
    report, after = refreshed(config)
    assert (report.num_equal, report.num_vectors) == (12, 0)
    assert {key: row["price"] for key, row in after.items() if row != before[key]} == {("0", 0): None, ("5", 0): 99.5}
    assert after["5", 0]["tags"] == ["tag 5"]
    assert_same_vectors(before, after, before)


def test_a_table_that_was_only_touched_rewrites_no_part_file(catalogue):
    path, configure = catalogue
    config = configure("price")
    write_table(path, list(range(12)), price=pa.array([float(sku) for sku in range(12)]))
    refreshed(config)
    paths = RecordTable(StoreFiles(config.store), "embeddings").paths()
    write_table(path, list(range(12)), price=pa.array([float(sku) for sku in range(12)]))
    report, _ = refreshed(config)
    assert report.num_equal == 12
    assert RecordTable(StoreFiles(config.store), "embeddings").paths() == paths
    assert not list(Path(config.store).glob("runs/*/journal/*.parquet")), "moves are needed no longer"


def test_members_of_a_tar_that_was_written_anew_are_found_at_their_new_offsets(make_run, tmp_path):
    def write_tar(numbers):
        members = {f"k{number}.png": samples.image_bytes(number) for number in numbers}
        samples.write_tar(tmp_path / "shard.tar", members)

    config = make_run(tmp_path / "shard.tar")
    write_tar(range(6))
    _, before = refreshed(config)
    write_tar([9, *range(6)])
    report, after = refreshed(config)
    assert (report.num_equal, report.num_vectors) == (6, 1)
    assert_same_vectors(before, after, before)
    assert all(after[key]["uri"] != row["uri"] for key, row in before.items())
    hits = embedder.open_store(config.store).search(np.array(before["shard/k3", 0]["image_embedding"], np.float32), k=1)
    assert np.array_equal(hits.thumbnails()[0], thumbnail_of(samples.image_bytes(3)))
