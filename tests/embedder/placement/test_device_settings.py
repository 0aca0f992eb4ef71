"""Sizes of batches and blocks by device, by the bytes that a model hands on, and by the object store."""

import pytest
from published_models import PUBLISHED

from embedder.executors.block_size import items_per_block
from embedder.placement.device_settings import (
    BLOCKS_PER_REPLICA,
    CPU_SETTINGS,
    GPU_SETTINGS,
    batch_sizes,
    fit_to_store,
    gpu_type,
    group_costs,
    settings_of,
)
from shards.costs import cut_bytes
from shards.length_groups import gpu_groups


@pytest.mark.medium
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_batch_fits_into_a_hand_over_at_every_cut(name, tmp_path):
    config = PUBLISHED[name].describe(tmp_path)
    widest = max(
        tower.inputs_per_row * cut_bytes(config, side, layer, "bfloat16", 16)
        for side, tower in config.towers.items()
        for layer in range(tower.num_layers + 1)
    )
    first, *others = batch_sizes("auto", settings_of(["cuda"], config))
    assert first * widest <= GPU_SETTINGS.max_batch_bytes
    assert first == GPU_SETTINGS.batch_sizes[0] or 2 * first * widest > GPU_SETTINGS.max_batch_bytes
    assert [each / first for each in others] == [2, 4, 0.5, 0.25]
    assert settings_of(["cpu"], config) == CPU_SETTINGS
    assert batch_sizes(12, settings_of(["cuda"], config)) == (12,)


def test_a_gpu_that_computes_slower_groups_captions_by_less_padding(tmp_path):
    config = PUBLISHED["CLIP ViT-B/32"].describe(tmp_path)
    prices = {
        (gpu, dtype): dict(group_costs(config, [gpu], dtype))["text"].price_tokens
        for gpu in ("A100", "H100")
        for dtype in ("float32", "bfloat16")
    }
    assert prices["A100", "float32"] < prices["A100", "bfloat16"] < prices["H100", "bfloat16"]
    assert prices["H100", "float32"] < prices["H100", "bfloat16"]


def test_a_group_of_a_decoders_texts_costs_the_launches_of_its_norms_and_rotations(tmp_path):
    config = PUBLISHED["Qwen3-VL-Embedding 2B"].describe(tmp_path)
    tower = config.text
    flops = gpu_type("H100").flops["bfloat16"]
    as_encoder = gpu_groups(tower.flops(16).layer / 16, 15, flops).price_tokens
    assert dict(group_costs(config, ["H100"], "bfloat16"))["text"].price_tokens == pytest.approx(54 / 15 * as_encoder)


def test_blocks_of_a_gpu_leave_each_step_room_for_several_in_the_object_store():
    def fitted(store_bytes, num_replicas=1, row=500 << 10):
        return fit_to_store(GPU_SETTINGS, row, store_bytes, num_steps=5, num_replicas=num_replicas)

    assert fitted(0) == fitted(16 << 30) == GPU_SETTINGS, "unknown, or enough"
    for store_bytes, num_replicas in ((1 << 30, 1), (4 << 30, 1), (16 << 30, 8), (75 << 20, 1)):
        found = fitted(store_bytes, num_replicas)
        room = store_bytes / 2 / 5
        assert BLOCKS_PER_REPLICA * num_replicas * found.max_block_bytes <= room, "half of it, in equal parts"
        assert found.block_bytes == found.max_block_bytes
        first = found.batch_sizes[0]
        assert first * (500 << 10) <= found.block_bytes and (
            first == GPU_SETTINGS.batch_sizes[0] or 2 * first * (500 << 10) > found.block_bytes
        )
        assert items_per_block("auto", first, 500 << 10, 10**6, settings=found) * (500 << 10) <= found.block_bytes
    assert fitted(1 << 30, row=10 << 10).batch_sizes == GPU_SETTINGS.batch_sizes, "small rows keep their batches"
    assert fitted(75 << 20, row=1 << 30).batch_sizes[0] == 1
    assert fit_to_store(CPU_SETTINGS, 1 << 20, 75 << 20, 5, 1) == CPU_SETTINGS


@pytest.mark.parametrize("store_gib", [1, 6.2, 6.3, 8, 12, 16, 17, 64])
def test_a_block_that_holds_one_wide_batch_leaves_room_for_several(store_gib):
    """A batch of 256 rows of so400m at 384 px is 410 MiB between two stages, more than a block should be."""
    row, room = 729 * 1152 * 2, int(store_gib * 2**30) / 2 / 5
    found = fit_to_store(GPU_SETTINGS, row, int(store_gib * 2**30), num_steps=5, num_replicas=1)
    first = found.batch_sizes[0]
    block_bytes = row * items_per_block("auto", first, row, 10**6, settings=found)
    assert block_bytes >= first * row
    assert BLOCKS_PER_REPLICA * block_bytes <= room
    assert first == 256 or 2 * BLOCKS_PER_REPLICA * first * row > room, "no smaller than needed"
