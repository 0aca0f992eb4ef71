"""Refresh of a Hugging Face dataset whose rows have no ids: a changed row, an appended shard, a removed row."""

import os
from hashlib import blake2b

import numpy as np
import pyarrow.parquet as pq
import pytest
import samples
from hugging_face import write_shard
from refresh_runs import items_of, refreshed

import embedder
from embedder.errors import SourceError
from embedder.media.sandbox import SandboxedDecoder
from embedder.retrieval.hit import THUMBNAIL
from embedder.sources.item_ranges import open_item

pytestmark = pytest.mark.medium


def digest(seed):
    return blake2b(samples.image_bytes(seed), digest_size=16).hexdigest()


def shard(folder, number, seeds, captions=None):
    texts = captions or [f"picture {seed}" for seed in seeds]
    images = [samples.image_bytes(seed) for seed in seeds]
    return write_shard(folder / f"train-{number:05}-of-00002.parquet", images, caption=texts, row_group_size=3)


@pytest.fixture
def dataset(make_run, tmp_path):
    """Two shards of five rows, and a configuration with some rule for ids."""
    folder = tmp_path / "data"
    shard(folder, 0, range(5))
    shard(folder, 1, range(5, 10))

    def configure(rule, image="image"):
        columns = {"id": rule, "image": image, "caption": "caption"}
        return make_run([{"path": str(folder), "columns": columns}], rows_per_part=3, max_retire_fraction=0.5)

    return folder, configure


def assert_images_are_theirs(config, after, seed_of):
    """Each row's uri holds the image of its id, read as the search page reads it."""
    for (item_id, _), row in after.items():
        ranges = open_item(row["uri"], max_bytes=1 << 20)
        assert ranges.read_at(0, ranges.size) == samples.image_bytes(seed_of[item_id])
        ranges.close()
    store = embedder.open_store(config.store)
    item_id, row = next(((key[0], row) for key, row in after.items()))
    hits = store.search(np.array(row["image_embedding"], np.float32), k=1)
    assert hits[0].item_id == item_id
    (shown,) = hits.thumbnails()
    with SandboxedDecoder() as sandbox:
        expected = sandbox.image(samples.image_bytes(seed_of[item_id]), THUMBNAIL)
    assert np.array_equal(shown, expected)


@pytest.mark.parametrize("image", ["image", "image.bytes"])
def test_by_content_only_what_is_new_is_embedded_wherever_rows_lie(dataset, image):
    folder, configure = dataset
    config = configure("content", image)
    report, before = refreshed(config)
    seed_of = {digest(seed): seed for seed in range(20)}
    assert {key[0] for key in before} == {digest(seed) for seed in range(10)}

    shard(folder, 0, [0, 17, 2, 4])  # 1 became 17, 3 is gone, 4 moved up
    report, after = refreshed(config)
    assert {key[0] for key in after} == {digest(seed) for seed in (0, 17, 2, 4, *range(5, 10))}
    assert (report.num_new, report.num_equal, report.num_retired, report.num_vectors) == (1, 3, 2, 1)
    for seed in (0, 2, 4, *range(5, 10)):
        key = digest(seed), 0
        assert after[key]["run_id"] == before[key]["run_id"]
    assert_images_are_theirs(config, after, seed_of)

    write_shard(folder / "train-00002-of-00003.parquet", [samples.image_bytes(12)], caption=["picture 12"])
    report, grown = refreshed(config)
    assert (report.num_new, report.num_retired, report.num_vectors) == (1, 0, 1)
    assert grown.keys() - after.keys() == {(digest(12), 0)}


def test_by_content_the_first_row_of_an_image_gives_its_caption_and_place(dataset):
    folder, configure = dataset
    config = configure("content")
    shard(folder, 1, [2, 2, 8], ["also 2", "again 2", "picture 8"])
    report, before = refreshed(config)
    assert report.num_items == 6
    assert before[digest(2), 0]["caption"] == "picture 2"
    shard(folder, 0, [0, 1])
    _, after = refreshed(config)
    assert {key[0] for key in after} == {digest(seed) for seed in (0, 1, 2, 8)}
    assert after[digest(2), 0]["caption"] == "also 2"
    assert "train-00001" in after[digest(2), 0]["uri"]


def test_by_content_a_row_that_moves_to_a_file_as_old_as_its_own_is_followed(dataset):
    folder, configure = dataset
    config = configure("content")
    paths = sorted(folder.iterdir())
    for path in paths:
        os.utime(path, ns=(1, 1))
    refreshed(config)
    shard(folder, 0, range(5, 10))
    shard(folder, 1, range(5))
    for path in paths:
        os.utime(path, ns=(1, 1))
    report, after = refreshed(config)
    assert report.num_vectors == 0
    assert_images_are_theirs(config, after, {digest(seed): seed for seed in range(10)})


def test_by_file_and_row_an_unchanged_file_is_left_alone_and_a_removed_row_shifts_those_behind(dataset):
    folder, configure = dataset
    config = configure("file+row")
    _, before = refreshed(config)
    first, second = (f"train-{number:05}-of-00002.parquet" for number in range(2))
    assert {key[0] for key in before} == {f"{name}#{row}" for name in (first, second) for row in range(5)}
    shard(folder, 0, [0, 1, 3, 4])  # 2 is gone
    report, after = refreshed(config)
    assert (report.num_retired, report.num_equal, report.num_vectors) == (1, 2, 2)
    assert (first + "#4", 0) not in after
    assert [after[f"{first}#{row}", 0]["caption"] for row in range(4)] == [f"picture {seed}" for seed in (0, 1, 3, 4)]
    seed_of = {f"{first}#{row}": seed for row, seed in enumerate((0, 1, 3, 4))}
    seed_of |= {f"{second}#{row}": 5 + row for row in range(5)}
    assert_images_are_theirs(config, after, seed_of)


def test_a_row_that_is_no_image_is_a_reject_under_its_hash_until_it_is_repaired(dataset):
    folder, configure = dataset
    path = folder / "train-00000-of-00002.parquet"
    table = pq.read_table(path)
    write_shard(path, [b"no image", *(each["bytes"] for each in table["image"].to_pylist()[1:])], caption=["x"] * 5)
    config = configure("content")
    refreshed(config)
    rejected = [item for item, row in items_of(config).items() if row["state"] == "rejected"]
    assert rejected == [blake2b(b"no image", digest_size=16).hexdigest()]
    shard(folder, 0, range(5))
    refreshed(config)
    assert {row["state"] for row in items_of(config).values()} == {"embedded"}
    assert len(items_of(config)) == 10


def test_fields_and_labels_are_carried_and_found_by_conditions(dataset, make_run):
    folder, _ = dataset
    columns = {"id": "file+row", "image": "image"}
    source = {"path": str(folder), "columns": columns, "carryover": ["image.path", "caption"]}
    config = make_run([source])
    with pytest.raises(SourceError, match="carryover 'caption' is already a column"):
        refreshed(config)
    config = make_run([source | {"carryover": ["image.path"]}])
    _, rows = refreshed(config)
    assert [row["image.path"] for row in rows.values()] == [f"{number}.png" for number in range(5)] * 2
    hits = embedder.open_store(config.store).search("a picture", where="\"image.path\" = '3.png'", k=5)
    assert sorted(hit.item_id[-2:] for hit in hits) == ["#3", "#3"]
