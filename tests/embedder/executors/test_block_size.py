"""Blocks of items: as large as the model's rows allow, small where a run or its files ask for it."""

from dataclasses import replace

import pyarrow as pa
import pytest
from tiny_models import tiny_config

from embedder.config import load_config
from embedder.executors.block_size import cut_listing, fastest_item_s, items_per_block
from embedder.placement.device_settings import CPU_SETTINGS, FEW_ITEMS, FIRST_ITEMS, GPU_SETTINGS
from embedder.sources.uris import cell_prefix, row_uri
from shards.plan import plan_shards

KIB = 1 << 10
CAPTION = row_uri("/captions.parquet", 7).replace("7", "{}")


def listing(*sizes_bytes, uri="/photos/{}.jpg", caption="a dog on a beach"):
    numbers = range(len(sizes_bytes))
    columns = {"item_id": [str(number) for number in numbers], "uri": [uri.format(number) for number in numbers]}
    columns["caption"] = [caption] * len(numbers)
    columns = {name: pa.array(texts, pa.string()) for name, texts in columns.items()}
    return pa.table(columns | {"size_bytes": pa.array(sizes_bytes, pa.int64())})


@pytest.mark.parametrize("bytes_per_row", [12 * KIB, 52 * KIB, 151 * KIB, 1 << 30])
@pytest.mark.parametrize("num_items", [3, 1911, 20_000])
def test_blocks_are_the_most_whole_batches_that_model_and_run_allow(bytes_per_row, num_items):
    def is_allowed(num):
        return (
            num <= CPU_SETTINGS.max_items
            and num * bytes_per_row <= CPU_SETTINGS.block_bytes
            and num * CPU_SETTINGS.min_blocks <= num_items
        )

    found = items_per_block("auto", 32, bytes_per_row, num_items)
    assert found % 32 == 0
    assert found == 32 or is_allowed(found), "never less than a batch"
    assert not is_allowed(found + 32)


@pytest.mark.parametrize(
    ("item_s", "expected"), [(None, 64), (0.01, 64), (0.0005, 96), (0.00025, 128), (0.000001, 128)]
)
def test_a_stage_whose_calls_are_short_gets_larger_blocks(item_s, expected):
    assert items_per_block("auto", 32, 192 * KIB, 20_000, item_s) == expected
    assert expected * 192 * KIB <= CPU_SETTINGS.max_block_bytes
    assert items_per_block("auto", 32, 192 * KIB, 640, item_s) == 32, "a short run has as many blocks as before"


def test_the_fastest_stage_is_known_where_the_plan_knows_seconds():
    stages = plan_shards(tiny_config(), 2).stages
    assert fastest_item_s(stages) is None
    stages = [replace(stage, seconds_per_item=seconds) for stage, seconds in zip(stages, (0.5, 0.25), strict=True)]
    assert fastest_item_s(stages) == 0.25


def test_the_configuration_has_the_last_word():
    config = load_config(overrides={"decode": {"items_per_task": 7}})
    assert items_per_block(config.decode.items_per_task, 32, KIB, 20_000) == 7


def test_every_item_is_in_one_block_in_order():
    tables = [listing(*[10] * FIRST_ITEMS), listing(), listing(*[10] * 500), listing(*[10] * 3)]
    blocks = list(cut_listing(tables, 224))
    assert [block.num_rows for block in blocks] == [FEW_ITEMS] * (FIRST_ITEMS // FEW_ITEMS) + [224, 224, 52, 3]
    assert pa.concat_tables(blocks).equals(pa.concat_tables(tables))


def test_large_files_stand_in_short_blocks():
    large = CPU_SETTINGS.max_file_bytes + 1
    first, table = listing(*[10] * FIRST_ITEMS), listing(*[10] * 300, large, *[10] * 199)
    blocks = list(cut_listing([first, table], 224))[FIRST_ITEMS // FEW_ITEMS :]
    assert [block.num_rows for block in blocks] == [224, FEW_ITEMS, FEW_ITEMS, 148]
    assert next(cut_listing([table], 32)).num_rows == 32
    assert pa.concat_tables(blocks).equals(table)


@pytest.mark.parametrize(
    ("uri", "num_characters", "on_cpu", "on_gpu"),
    [
        (CAPTION, 0, 512, 512),
        (CAPTION, 100, 512, 512),
        (CAPTION, 300, 128, 512),
        (CAPTION, 2000, 64, 128),
        (cell_prefix("/photos.parquet", "image", 0) + "{}", 100, 64, 256),
        ("https://example.org/{}.jpg?size=large", 2000, 64, 256),
        ("s3://bucket/{}", 0, 64, 256),
        ("https://example.org/{}.MP4?from=1#t=2", 0, 64, 64),
        ("s3://bucket/{}.webm", 100, 64, 64),
        ("https://example.org/{}.mp4.jpg", 0, 64, 256),
    ],
)
def test_blocks_of_unknown_bytes_are_as_of_captions_pictures_or_clips(uri, num_characters, on_cpu, on_gpu):
    table = listing(*[None] * (FIRST_ITEMS + 1024), uri=uri, caption="x" * num_characters or None)
    for settings, expected in ((CPU_SETTINGS, on_cpu), (GPU_SETTINGS, on_gpu)):
        blocks = [block.num_rows for block in cut_listing([table], 512, settings)]
        small = FIRST_ITEMS // FEW_ITEMS
        assert blocks[: small + 1] == [FEW_ITEMS] * small + [expected]
        assert sum(blocks) == table.num_rows


def test_photographs_stand_in_blocks_of_whole_batches_on_a_gpu():
    """Of 112 kB each, they were cut into blocks of 64, which a GPU computes one by one."""
    size, row = 112_000, 151 * KIB
    found = {num: items_per_block("auto", 256, row, num, settings=GPU_SETTINGS) for num in (12_000, 10**6)}
    assert found == {12_000: 256, 10**6: 1024}
    for num_items, expected in ((256, 256), (512, 512), (1024, 512)):
        table = listing(*[10] * FIRST_ITEMS, *[size] * 2048)
        assert list(cut_listing([table], num_items, GPU_SETTINGS))[FIRST_ITEMS // FEW_ITEMS].num_rows == expected
