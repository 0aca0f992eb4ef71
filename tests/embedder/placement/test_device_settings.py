"""Batch sizes by device and by the bytes that a model hands on."""

import pytest
from published_models import PUBLISHED

from embedder.placement.device_settings import CPU_SETTINGS, GPU_SETTINGS, batch_sizes, settings_of
from shards.costs import cut_bytes


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
