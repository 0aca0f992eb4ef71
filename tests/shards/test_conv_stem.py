"""A ViT behind a convolutional stem: sharded, unsplit, and as plain torch modules compute it."""

import pytest
import torch
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.testing import assert_close

from shards.costs import weight_bytes
from shards.fingerprint import model_fingerprint
from shards.fresh import init_model
from shards.plan import plan_shards
from shards.reference import load_towers
from shards.shard import load_shard
from shards.shard_specs import whole_model
from shards.tensor_shapes import BATCH_COUNTER, model_shapes, shard_shapes
from shards.towers.vit import VitTower

STEM = {"stem": "conv", "class_token": False, "pool": "avg"}


def named_shapes(module):
    return {
        name: tuple(tensor.shape) for name, tensor in module.state_dict().items() if not name.endswith(BATCH_COUNTER)
    }


RESIDUAL = {**STEM, "stem_channels": (4, 8, 12), "stem_blocks": (0, 1, 2)}


@pytest.mark.parametrize(
    "vision", [STEM, {"stem": "conv"}, {**STEM, "patch_size": 16}, {**STEM, "pre_norm": True}, RESIDUAL]
)
def test_shards_behind_the_stem_equal_the_unsplit_towers_to_the_last_bit(make_config, make_model, make_batch, vision):
    config = make_config(vision)
    folder, batch = make_model(config), make_batch(config)
    towers = load_towers(folder)
    assert named_shapes(towers) == model_shapes(config)
    with torch.no_grad():
        expected = towers(batch)
    for num_stages in (1, 8):
        found = batch
        for stage in plan_shards(config, num_stages).stages:
            shard = load_shard(folder, stage.spec)
            assert named_shapes(shard) == shard_shapes(config, stage.spec)
            assert shard.weight_bytes == stage.weight_bytes == weight_bytes(config, stage.spec, "float32")
            found = shard(found)
        assert torch.equal(found.vision.values, expected.vision.values)
        assert torch.equal(found.text.values, expected.text.values)


def test_the_stem_is_three_plain_convolutions_with_norm_and_gelu(make_config, make_model, make_batch):
    """Nothing of this project but names stands between the file and the expected values."""
    config = make_config(STEM)
    folder, batch = make_model(config), make_batch(config, frames=(1, 1, 1), tokens=(1, 1, 1))
    weights = {
        name.removeprefix("vision."): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if name.startswith("vision.")
    }
    layers = []
    for layer, (num_in, num_out) in enumerate(((3, 8), (8, 16), (16, 32))):
        conv, norm = nn.Conv2d(num_in, num_out, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(num_out)
        name = f"patch_embed.backbone.{layer}"
        conv.load_state_dict({"weight": weights.pop(f"{name}.conv.weight")})
        norm.load_state_dict(
            {key: weights.pop(f"{name}.bn.{key}") for key in ("weight", "bias", "running_mean", "running_var")}
        )
        layers += [conv, norm, nn.GELU()]
    stem = nn.Sequential(*layers).eval()
    vit = VisionTransformer(
        img_size=4, patch_size=1, in_chans=32, num_classes=0, global_pool="avg", embed_dim=32, depth=4, num_heads=2,
        class_token=False, fc_norm=False,
        norm_layer=lambda width, **options: nn.LayerNorm(width, eps=1e-6, **options),
    ).eval()  # fmt: skip
    vit.load_state_dict(weights, strict=True)
    mean, std = torch.tensor(config.preprocess.mean), torch.tensor(config.preprocess.std)
    pixels = ((batch.vision.values / 255 - mean) / std).permute(0, 3, 1, 2)
    with torch.no_grad():
        pooled = vit.forward_head(vit.forward_features(stem(pixels)), pre_logits=True)
    projection = load_file(folder / "model.safetensors")["vision_head.projection.weight"]
    expected = nn.functional.normalize(pooled @ projection.T)
    found = load_shard(folder, whole_model(config))(batch)
    assert_close(found.vision.values, expected, atol=2e-6, rtol=0)


def test_residual_blocks_of_the_stem_are_resnets_own(make_config, make_model, make_batch):
    """Two convolutions with norms, the input added, as in He et al. 2015, but with GELU."""
    config = make_config({**STEM, "stem_channels": (4, 8, 12), "stem_blocks": (1, 0, 0)})
    folder, batch = make_model(config), make_batch(config, frames=(1, 1), tokens=(1, 1))
    weights = load_file(folder / "model.safetensors")
    towers = load_towers(folder)

    def normed(x, conv, norm, stride=1):
        name = "vision.patch_embed.backbone"
        x = nn.functional.conv2d(x, weights[f"{name}.{conv}.weight"], stride=stride, padding=1)
        parts = (weights[f"{name}.{norm}.{part}"] for part in ("running_mean", "running_var", "weight", "bias"))
        return nn.functional.batch_norm(x, *parts)

    pixels = towers.normalise(batch.vision.values, torch.float32)
    x = nn.functional.gelu(normed(pixels, "0.conv", "0.bn", stride=2))
    within = normed(nn.functional.gelu(normed(x, "1.conv1", "1.bn1")), "1.conv2", "1.bn2")
    expected = nn.functional.gelu(within + x)
    with torch.no_grad():
        found = towers.vision.patch_embed.backbone[:2](pixels)
    assert_close(found, expected, atol=1e-6, rtol=0)


def test_a_stem_that_does_not_fit_is_refused(make_config):
    for changes, message in (({"patch_size": 4}, "patch_size"), ({"width": 6, "num_heads": 2}, "width")):
        with pytest.raises(ValueError, match=rf"{changes.get(message)}\) is no multiple of the conv stem"):
            VitTower(**({"image_size": 32, "patch_size": 8, "stem": "conv"} | changes))
    with pytest.raises(ValueError, match='belong to stem = "conv"'):
        VitTower(stem_blocks=(0, 0, 1))
    with pytest.raises(ValueError, match="from 0 up"):
        VitTower(stem="conv", stem_blocks=(0, -1, 1))


def test_fresh_stems_start_with_statistics_of_nothing_and_count_as_another_model(make_config, tmp_path):
    config = make_config(STEM)
    folder = init_model(config, tmp_path / "conv", seed=0)
    weights = load_file(folder / "model.safetensors")
    assert weights["vision.patch_embed.backbone.2.bn.running_mean"].eq(0).all()
    assert weights["vision.patch_embed.backbone.2.bn.running_var"].eq(1).all()
    other = init_model(make_config({"class_token": False, "pool": "avg"}), tmp_path / "patch", seed=0)
    assert model_fingerprint(folder) != model_fingerprint(other)


def test_the_stem_costs_its_three_convolutions_and_the_projection(make_config):
    config = make_config(STEM)
    # 16 x 16 places of 3 to 8 channels, 8 x 8 of 8 to 16, 4 x 4 of 16 to 32; then 1 x 1 of 32 to 32.
    expected = 2 * (16 * 16 * 9 * 3 * 8 + 8 * 8 * 9 * 8 * 16 + 4 * 4 * 9 * 16 * 32 + 4 * 4 * 32 * 32)
    assert config.vision.flops(0).front == expected


def test_a_residual_block_costs_two_convolutions_of_its_map(make_config):
    plain = make_config({**STEM, "stem_channels": (4, 8, 12)}).vision.flops(0).front
    # One block of 8 channels on 8 x 8 places, two of 12 on 4 x 4.
    blocks = 2 * 2 * (8 * 8 * 9 * 8 * 8 + 2 * 4 * 4 * 9 * 12 * 12)
    assert make_config(RESIDUAL).vision.flops(0).front == plain + blocks


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8"])
def test_the_stem_stays_in_float32_whatever_the_dtype(make_config, make_model, make_batch, dtype):
    """In bfloat16, rounding its maps on their way turned vectors further than all layers do."""
    config = make_config(RESIDUAL)
    folder = make_model(config)
    batch = make_batch(config, frames=[1] * 8, tokens=[3] * 8)
    shard, exact = (load_shard(folder, whole_model(config), dtype=name) for name in (dtype, "float32"))
    stem = {name: tensor for name, tensor in shard.state_dict().items() if ".backbone." in name}
    assert {tensor.dtype for name, tensor in stem.items() if "num_batches" not in name} == {torch.float32}
    assert shard.weight_bytes == weight_bytes(config, whole_model(config), dtype)
    pixels = exact.normalise(batch.vision.values, torch.float32)
    maps = shard.vision.patch_embed.backbone(pixels)
    assert maps.dtype == shard.dtype
    assert torch.equal(maps, exact.vision.patch_embed.backbone(pixels).to(shard.dtype))
    found, expected = shard(batch), exact(batch)
    assert torch.cosine_similarity(found.vision.values, expected.vision.values).min() >= 0.999
