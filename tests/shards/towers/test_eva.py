"""timm's Eva: names and shapes at full size, rotary positions, int8 and bfloat16."""

import pytest
import torch
from tower_checks import LEAST_MOVE, embed_whole, make_batch

from shards.fresh import init_model
from shards.model_config import ModelConfig
from shards.model_errors import ModelError
from shards.preprocess import PreprocessConfig
from shards.ranges import LayerRange
from shards.towers.eva import EvaTower

SMALL = {"image_size": 32, "patch_size": 8, "width": 48, "depth": 3, "num_heads": 4, "pool": "avg"}


def make_folder(path, **changes):
    tower = EvaTower(**SMALL | changes)
    config = ModelConfig(
        name="eva",
        trained=False,
        embedding_dim=tower.width,
        vision=tower,
        text=None,
        vision_projection="none",
        preprocess=PreprocessConfig(image_size=tower.image_size),
    )
    init_model(config, path, seed=3)
    return path, make_batch(config, [])


@pytest.mark.parametrize(
    "changes",
    [
        {"rope": "none"},
        {"rope": "dinov3"},
        {"rope_temperature": 10.0},
        {"rope_rotate_half": True},
        {"rope_ref_side": 8},
        {"rope_grid_indexing": "xy"},
    ],
    ids=str,
)
def test_each_setting_of_rotary_positions_matters(tmp_path, changes):
    # Absolute positions are left out, and registers put in: rotary positions turn patches only.
    common = {"pos_embed": "none", "num_reg_tokens": 2}
    folder, batch = make_folder(tmp_path / "as it is", **common)
    changed, _ = make_folder(tmp_path / "changed", **common, **changes)
    moved = (embed_whole(folder, batch)["vision"] - embed_whole(changed, batch)["vision"]).abs().max()
    assert float(moved) > LEAST_MOVE


def test_patch_dropout_is_refused(tmp_path):
    tower = EvaTower(**SMALL)
    module = tower.build()
    with pytest.raises(ModelError, match="patch_dropout: 9 of 17 tokens"):
        tower.run(module, LayerRange(0, 3), torch.zeros(1, 9, 48), None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 24}, "rotary positions take a multiple of 4"),
        ({"mlp": "swiglu_packed", "scale_mlp_norm": True}, "write 'swiglu'"),
        ({"mlp": "swiglu", "post_norm": True}, "write 'swiglu_packed'"),
        ({"post_norm": True, "qk_norm": True}, "neither qk_norm nor init_values"),
        ({"pool": "map", "attn_pool_num_heads": 5}, "no multiple of attn_pool_num_heads"),
        ({"pool": "token", "class_token": False}, "needs class_token"),
        ({"patch_size": 64}, r"patch_size \(64\) exceeds image_size \(32\)"),
    ],
)
def test_what_timm_does_not_build_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        EvaTower(**SMALL | changes)
