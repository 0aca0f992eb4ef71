"""ViT, DeiT, DINOv2 and DINOv3 of transformers: their checkpoints against the library's own features, every cut."""

import pytest
import torch
import transformers
from library_checkpoints import SIZE, SMALL_VISION, WIDE_VISION
from tiny_tokenizers import NUM_TOKENS, image_features, save_checkpoint, wordpiece
from tower_checkpoints import edit_json
from tower_checks import check_against, check_every_cut, check_every_part_matters, check_refused, make_batch, randomise

from shards.convert import import_checkpoint
from shards.model_config import load_model_config

DINOV2 = SMALL_VISION | {"mlp_ratio": 2}
DINOV3 = WIDE_VISION | {"num_register_tokens": 2}

# By name: classes of the model and of its configuration, settings, arguments of the model, family here.
MODELS = {
    "vit": ("ViTModel", WIDE_VISION, {}, "vit"),
    "vit without pooler": ("ViTModel", WIDE_VISION, {"add_pooling_layer": False}, "vit"),
    "vit whose patches leave a rest": ("ViTModel", WIDE_VISION | {"patch_size": 7}, {}, "vit"),
    "deit": ("DeiTModel", WIDE_VISION, {}, "vit"),
    "dinov2": ("Dinov2Model", DINOV2, {}, "vit"),
    "dinov2 with swiglu": ("Dinov2Model", DINOV2 | {"use_swiglu_ffn": True, "qkv_bias": False}, {}, "vit"),
    "dinov2 with registers": ("Dinov2WithRegistersModel", DINOV2 | {"num_register_tokens": 3}, {}, "vit"),
    "dinov2 for larger images": ("Dinov2Model", DINOV2 | {"image_size": 56}, {}, "vit"),
    "dinov2 with registers for larger images": ("Dinov2WithRegistersModel", DINOV2 | {"image_size": 56}, {}, "vit"),
    "dinov3 for larger images": ("DINOv3ViTModel", DINOV3 | {"image_size": 48}, {}, "eva"),
    "dinov3": ("DINOv3ViTModel", DINOV3, {}, "eva"),
    "dinov3 gated": ("DINOv3ViTModel", DINOV3 | {"use_gated_mlp": True, "hidden_act": "silu"}, {}, "eva"),
    "dinov3 with all biases": ("DINOv3ViTModel", DINOV3 | {"key_bias": True}, {}, "eva"),
    "dinov3 without biases": ("DINOv3ViTModel", DINOV3 | {"query_bias": False, "value_bias": False}, {}, "eva"),
    "dinov3 without registers": ("DINOv3ViTModel", DINOV3 | {"num_register_tokens": 0}, {}, "eva"),
}


def save(folder, name):
    class_name, settings, arguments, _ = MODELS[name]
    model_class = getattr(transformers, class_name)
    config = getattr(transformers, class_name.replace("Model", "Config"))(**settings)
    model = randomise(model_class(config, **arguments))
    model.save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": SIZE, "width": SIZE}).save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=list(MODELS))
def tower(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tower")
    model = save(folder / "checkpoint", request.param)
    config = import_checkpoint(folder / "checkpoint", folder / "model")
    assert config.vision.family == MODELS[request.param][3]
    return folder / "model", model


def test_an_imported_tower_gives_transformers_own_features(tower):
    folder, model = tower
    config = load_model_config(folder)

    def images(state):
        mean, std = torch.tensor(config.preprocess.mean), torch.tensor(config.preprocess.std)
        found = model(((state.values / 255 - mean) / std).permute(0, 3, 1, 2))
        return found.last_hidden_state[:, 0] if found.pooler_output is None else found.pooler_output

    check_against(folder, make_batch(config, []), {"vision": images})


def test_every_cut_gives_the_bits_of_the_unsplit_tower(tower):
    check_every_cut(tower[0], make_batch(load_model_config(tower[0]), []))


@pytest.mark.slow
def test_no_part_can_be_left_out(tower, tmp_path):
    check_every_part_matters(tower[0], make_batch(load_model_config(tower[0]), []), tmp_path)


def test_the_classifier_around_a_tower_is_left_out(tmp_path):
    bare = save(tmp_path / "bare", "dinov2")
    whole = transformers.Dinov2ForImageClassification(transformers.Dinov2Config(**DINOV2))
    whole.dinov2.load_state_dict(bare.state_dict())
    whole.save_pretrained(tmp_path / "whole")
    (tmp_path / "bare/preprocessor_config.json").rename(tmp_path / "whole/preprocessor_config.json")
    config = import_checkpoint(tmp_path / "whole", tmp_path / "model")

    def images(state):
        mean, std = torch.tensor(config.preprocess.mean), torch.tensor(config.preprocess.std)
        return bare(((state.values / 255 - mean) / std).permute(0, 3, 1, 2)).pooler_output

    check_against(tmp_path / "model", make_batch(config, []), {"vision": images})


@pytest.mark.parametrize("name", ["deit", "dinov2", "dinov2 with registers", "dinov3"])
def test_the_tower_of_a_dual_encoder_is_imported_as_well(tmp_path, name):
    class_name, settings, *_ = MODELS[name]
    vision = getattr(transformers, class_name.replace("Model", "Config"))(**settings)
    text = transformers.BertConfig(vocab_size=NUM_TOKENS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    both = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(vision, text, projection_dim=20)
    model = randomise(transformers.VisionTextDualEncoderModel(both))
    save_checkpoint(tmp_path / "checkpoint", model, wordpiece(), SIZE)
    config = import_checkpoint(tmp_path / "checkpoint", tmp_path / "model")
    features = {"vision": image_features(model, config.preprocess)}
    check_against(tmp_path / "model", make_batch(config, [[1, 2, 3]]), features)


@pytest.mark.parametrize(
    ("name", "changes", "side", "message"),
    [
        ("dinov3", {"hidden_act": "relu"}, SIZE, "hidden_act = 'relu'; only 'gelu' can be imported"),
        ("dinov3", {"mlp_bias": False}, SIZE, "mlp_bias = False"),
        ("dinov3", {"query_bias": False}, SIZE, "query_bias, key_bias, value_bias"),
        ("dinov2", {"num_channels": 1}, SIZE, "num_channels = 1"),
        ("dinov2", {"patch_size": 64}, SIZE, r"patch_size \(64\) exceeds image_size \(32\)"),
        ("dinov2 with registers", {"image_size": 40}, 40, "position_embeddings"),
        ("deit", {"image_size": [32, 40]}, SIZE, "only squares can be imported"),
        ("vit", {}, 40, "as the model takes 32 px"),
        ("dinov2", {}, 4, r"patch_size \(8\) exceeds image_size \(4\)"),
    ],
)
def test_what_can_not_be_built_is_refused_in_one_line(tmp_path, name, changes, side, message):
    save(tmp_path / "checkpoint", name)
    edit_json(tmp_path / "checkpoint/config.json", **changes)
    edit_json(tmp_path / "checkpoint/preprocessor_config.json", size={"height": side, "width": side})
    check_refused(import_checkpoint, tmp_path / "checkpoint", tmp_path / "model", message)
