"""timm's VisionTransformer and Eva: their checkpoints against timm's own features, every cut, all of timm's models."""

import pytest
import timm
import torch
from library_checkpoints import save_timm
from library_versions import is_older
from tower_checks import check_against, check_every_cut, check_every_part_matters, check_refused, make_batch, randomise

from shards.convert import import_checkpoint
from shards.convert.timm_vision import read_timm_tower
from shards.model_config import load_model_config
from shards.model_errors import ModelError
from shards.ranges import LayerRange

SIZE = 32
SMALL = {"img_size": SIZE, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2}
POOL_HEADS = SMALL | {"attn_pool_num_heads": 4}

# Each has parts that the others lack.
MODELS = {
    "vit_small_patch16_224": SMALL,
    "vit_base_patch14_reg4_dinov2": SMALL,  # registers, LayerScale, no position of the class token
    "vit_giant_patch14_dinov2": SMALL | {"mlp_ratio": 3},  # packed SwiGLU
    "vit_base_patch16_clip_quickgelu_224": SMALL,  # norm in front, no patch bias
    "vit_mediumd_patch16_reg4_gap_256": SMALL,  # no class token, average behind which the norm comes
    "vit_so150m_patch16_reg4_map_256": SMALL,  # attention pooling
    "aimv2_1b_patch14_224": SMALL,  # RMSNorm, SwiGLU, norm of the patches, no biases
    "beit3_base_patch16_224": SMALL,  # norms inside attention and MLP
    "vit_so400m_patch14_siglip_384": SMALL | {"patch_size": 7},  # patches that leave a rest of the image
    "vit_intern300m_patch14_448": SMALL | {"qk_norm": True},
    "eva02_tiny_patch14_224": SMALL,  # rotary positions, packed SwiGLU
    "eva02_large_patch14_clip_336": SMALL,  # q, k and v apart; SwiGLU with a norm; norm inside attention
    "eva02_enormous_patch14_clip_224": SMALL,  # norms behind attention and MLP, no rotary positions
    "vit_base_patch16_dinov3": SMALL | {"global_pool": "token"},  # positions of DINOv3, registers, LayerScale
    "vit_7b_patch16_dinov3": SMALL,  # SwiGLU of a multiple of 64
    "vit_small_patch16_dinov3_qkvb": SMALL | {"qk_norm": True},
    "vit_betwixt_patch16_rope_reg4_gap_256": SMALL,  # no class token, no absolute positions
    "vit_base_patch16_rope_ape_224": SMALL,  # keys with a bias, both kinds of positions
    "vit_pe_core_base_patch16_224": POOL_HEADS,  # attention pooling with heads of its own
    "vit_pe_spatial_tiny_patch16_512": SMALL,  # no norm at the end
}

# By the reason, how many of timm's models can't be imported.
REFUSED = {
    "vision_transformer": {
        "layers: found ParallelScalingBlock": 4,
        "layers: found ParallelThingsBlock": 2,
        "layers: found DiffParallelScalingBlock": 1,
        "layers: found ResPostBlock": 1,
        "attention: found DiffAttention": 2,
        "takes class and register tokens too": 1,
    },
    "eva": {"RotaryEmbeddingMixed": 6, "only squares": 5},
}
IMPORTED = {"vision_transformer": 152, "eva": 54}
COUNTED_IN = "1.0.31"  # the version of timm that has as many


def make_timm(name, **settings):
    """Make a model of timm; skips the test where the installed timm has no such setting, or no such model."""
    if not timm.is_model(name):
        pytest.skip(f"this timm has no {name}")
    try:
        return timm.create_model(name, num_classes=5, **settings)
    except TypeError as error:  # settings that came with timm 1.0.31
        pytest.skip(str(error))


@pytest.fixture(scope="module", params=list(MODELS))
def tower(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tower")
    model = randomise(make_timm(request.param, **MODELS[request.param]))
    save_timm(model, folder / "checkpoint", **MODELS[request.param])
    import_checkpoint(folder / "checkpoint", folder / "model")
    return folder / "model", model


def test_an_imported_tower_gives_timms_own_features(tower):
    folder, model = tower
    config = load_model_config(folder)

    def images(state):
        mean, std = torch.tensor(config.preprocess.mean), torch.tensor(config.preprocess.std)
        pixels = ((state.values / 255 - mean) / std).permute(0, 3, 1, 2)
        return model.forward_head(model.forward_features(pixels), pre_logits=True)

    check_against(folder, make_batch(config, []), {"vision": images})


def test_every_cut_gives_the_bits_of_the_unsplit_tower(tower):
    check_every_cut(tower[0], make_batch(load_model_config(tower[0]), []))


@pytest.mark.slow
def test_no_part_can_be_left_out(tower, tmp_path):
    check_every_part_matters(tower[0], make_batch(load_model_config(tower[0]), []), tmp_path)


@pytest.mark.medium
@pytest.mark.parametrize("module", list(IMPORTED))
def test_timms_models_are_described_or_refused_by_what_is_missing(tmp_path, module):
    num_imported, refused = 0, dict.fromkeys(REFUSED[module], 0)
    for name in timm.list_models(module=module):
        # Depth is the one number that all of them take, and that changes no kind of part.
        depth = {} if "sapiens2" in name else {"depth": 1}
        with torch.device("meta"):
            model = timm.create_model(name, num_classes=0, **depth)
        try:
            found = read_timm_tower(model, tmp_path)
        except ModelError as error:
            (reason,) = (each for each in refused if each in str(error))
            refused[reason] += 1
            continue
        num_imported += 1
        expected = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
        assert found.shapes(LayerRange(0, found.num_layers)) == expected, name
    if not is_older("timm", COUNTED_IN):
        assert (num_imported, refused) == (IMPORTED[module], REFUSED[module])


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "deit_tiny_distilled_patch16_224",
            SMALL | {"img_size": (32, 48)},
            "VisionTransformerDistilled; of timm",
        ),
        ("vit_small_patch16_224", SMALL | {"img_size": (32, 48)}, "only squares"),
        ("vit_small_patch16_224", SMALL | {"global_pool": ""}, "pooling ''"),
        ("vit_base_patch16_dinov3", SMALL | {"rope_jitter_coords": 2.0}, None),  # only of training
    ],
)
def test_what_can_not_be_built_is_refused_in_one_line(tmp_path, name, settings, message):
    model = make_timm(name, **settings)
    save_timm(model, tmp_path / "checkpoint", **settings)
    if message is None:
        import_checkpoint(tmp_path / "checkpoint", tmp_path / "model")
        return
    check_refused(import_checkpoint, tmp_path / "checkpoint", tmp_path / "model", message)


def test_other_rotary_positions_are_seen(tmp_path):
    model = timm.create_model("eva02_tiny_patch14_224", **SMALL)
    model.rope.pos_embed.mul_(0.5)
    with pytest.raises(ModelError, match="its rotary positions"):
        read_timm_tower(model, tmp_path)
