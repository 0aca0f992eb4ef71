"""A VisionTextDualEncoderModel that transformers saved: in, against its own features, and out again."""

import json
import shutil
from importlib.metadata import version

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from tower_checkpoints import edit_json
from tower_checks import check_refused, randomise

from shards.activations import Batch, TowerState
from shards.convert import export_vision_text_dual_encoder, import_transformers
from shards.convert.checkpoint import import_checkpoint
from shards.fingerprint import model_fingerprint
from shards.model_config import load_model_config
from shards.model_errors import ModelError
from shards.model_summary import read_import_record
from shards.plan import plan_shards
from shards.shard import load_shard
from shards.towers.from_transformers import mlp_ratio

CAPTIONS = ["a red car", "two cats sleep on a sofa in the rain", "fruit"]


def save_checkpoint(folder, tokenizer_json, processor, vision=None, text=None, **save_options):
    from tokenizers import Tokenizer
    from transformers import (
        AlbertConfig,
        PreTrainedTokenizerFast,
        VisionTextDualEncoderConfig,
        VisionTextDualEncoderModel,
        ViTConfig,
    )

    vit = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 72}
    albert = {"hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 40}
    config = VisionTextDualEncoderConfig.from_vision_text_configs(
        ViTConfig(**(vit | {"image_size": 24, "patch_size": 8} | (vision or {}))),
        AlbertConfig(
            **(albert | {"vocab_size": 110, "embedding_size": 16, "max_position_embeddings": 40} | (text or {}))
        ),
        projection_dim=20,
    )
    torch.manual_seed(0)
    model = randomise(VisionTextDualEncoderModel(config))
    model.save_pretrained(folder, **save_options)
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tokenizer_json), **special)
    tokenizer.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model, tokenizer


def vit_processor(**options):
    from transformers import ViTImageProcessor

    return ViTImageProcessor(**({"size": {"height": 24, "width": 24}, "image_mean": [0.3, 0.4, 0.5]} | options))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, tokenizer_json):
    folder = tmp_path_factory.mktemp("hf") / "encoder"
    model, tokenizer = save_checkpoint(folder, tokenizer_json, vit_processor(), text={"num_hidden_groups": 2})
    return folder, model, tokenizer


@pytest.fixture
def own_checkpoint(checkpoint, tmp_path):
    return shutil.copytree(checkpoint[0], tmp_path / "own")


@torch.no_grad()
def their_features(model, tokenizer, pixels, config, captions=CAPTIONS):
    mean, std = torch.tensor(config.preprocess.mean), torch.tensor(config.preprocess.std)
    images = model.get_image_features(((pixels / 255 - mean) / std).permute(0, 3, 1, 2)).pooler_output
    encoded = tokenizer(captions, padding=True, return_tensors="pt")
    texts = model.get_text_features(
        input_ids=encoded["input_ids"], attention_mask=encoded["attention_mask"]
    ).pooler_output
    normalise = torch.nn.functional.normalize
    return normalise(images), normalise(texts)


def our_features(folder, pixels, captions=CAPTIONS, num_stages=3):
    from tokenizers import Tokenizer

    config = load_model_config(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [torch.tensor(tokenizer.encode(caption).ids, dtype=torch.int32) for caption in captions]
    batch = Batch(
        TowerState(pixels, torch.ones(len(pixels), dtype=torch.int64)),
        TowerState(torch.cat(ids), torch.tensor([len(row) for row in ids])),
    )
    for stage in plan_shards(config, num_stages).stages:
        batch = load_shard(folder, stage.spec)(batch)
    return batch.vision.values, batch.text.values


def random_pixels(size=24):
    return torch.randint(0, 256, (5, size, size, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def assert_same_features(folder, model, tokenizer):
    pixels = random_pixels()
    expected = their_features(model, tokenizer, pixels, load_model_config(folder))
    found = our_features(folder, pixels)
    assert_close(found[0], expected[0], atol=2e-6, rtol=0)
    assert_close(found[1], expected[1], atol=2e-6, rtol=0)


@pytest.mark.medium
def test_shards_of_an_imported_model_give_transformers_own_features(checkpoint, tmp_path):
    folder, model, tokenizer = checkpoint
    config = import_transformers(folder, tmp_path / "out")
    assert config == load_model_config(tmp_path / "out")
    assert_same_features(tmp_path / "out", model, tokenizer)
    assert (config.trained, config.embedding_dim, config.name) == (True, 20, "encoder")
    assert (config.vision.mlp_width, config.vision.norm_eps, config.vision.pooler) == (72, 1e-12, "tanh")
    assert config.preprocess.model_dump() == {
        "image_size": 24,
        "resize": "squash",
        "resize_size": None,
        "interpolation": "bilinear",
        "resampler": "torchvision",
        "mean": (0.3, 0.4, 0.5),
        "std": (0.5, 0.5, 0.5),
        "reduced_decode": False,
        "caption_prompt": "",
        "query_prompt": "",
        "max_caption_tokens": 40,
        "instruction_form": "",
        "joins_captions": False,
        "clips": None,
    }
    assert load_file(tmp_path / "out" / "model.safetensors")["logit_scale"].item() == 1.25


def test_a_checkpoint_in_several_files_imports_to_the_same_model(checkpoint, tmp_path):
    folder, model, _ = checkpoint
    parted = shutil.copytree(folder, tmp_path / "encoder")
    (parted / "model.safetensors").unlink()
    model.save_pretrained(parted, max_shard_size="30KB")
    assert (parted / "model.safetensors.index.json").is_file()
    import_transformers(folder, tmp_path / "whole")
    import_transformers(parted, tmp_path / "parted")
    assert model_fingerprint(tmp_path / "whole") == model_fingerprint(tmp_path / "parted")


def test_the_names_that_newer_modules_have_import_too(checkpoint, own_checkpoint, tmp_path):
    model, tokenizer = checkpoint[1:]
    if "vision_model.layers.0.attention.q_proj.weight" not in model.state_dict():
        pytest.skip(f"the modules of transformers {version('transformers')} have the names of its files")
    save_file(dict(model.state_dict()), own_checkpoint / "model.safetensors")
    import_transformers(own_checkpoint, tmp_path / "out")
    assert_same_features(tmp_path / "out", model, tokenizer)


@pytest.mark.parametrize(
    ("vision", "text"),
    [
        ({"qkv_bias": False, "hidden_act": "gelu_new"}, {"hidden_act": "relu", "inner_group_num": 2}),
        ({"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}, {"hidden_act": "gelu", "type_vocab_size": 1}),
    ],
)
def test_other_activations_and_biases_import(tokenizer_json, tmp_path, vision, text):
    model, tokenizer = save_checkpoint(tmp_path / "hf", tokenizer_json, vit_processor(), vision, text)
    import_transformers(tmp_path / "hf", tmp_path / "out")
    assert_same_features(tmp_path / "out", model, tokenizer)


def test_a_processor_saved_together_with_the_tokeniser_is_found(checkpoint, own_checkpoint, tmp_path):
    settings = json.loads((own_checkpoint / "preprocessor_config.json").read_text())
    (own_checkpoint / "preprocessor_config.json").unlink()
    (own_checkpoint / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
    config = import_transformers(own_checkpoint, tmp_path / "out")
    assert config.preprocess.mean == (0.3, 0.4, 0.5)


def test_of_two_files_of_the_image_processor_the_one_counts_that_transformers_takes(own_checkpoint, tmp_path):
    from transformers import AutoImageProcessor

    settings = json.loads((own_checkpoint / "preprocessor_config.json").read_text())
    nested, bare = {"image_processor": settings | {"image_mean": [0.1, 0.2, 0.6]}}, {"processor_class": "Any"}
    for newer, winner in (nested, "processor_config.json"), (bare, "preprocessor_config.json"):
        (own_checkpoint / "processor_config.json").write_text(json.dumps(newer))
        config = import_checkpoint(own_checkpoint, tmp_path / winner)
        assert config.preprocess.mean == tuple(AutoImageProcessor.from_pretrained(own_checkpoint).image_mean)
        files = {each["file"]: each for each in read_import_record(tmp_path / winner)["files"]}
        (loser,) = {"preprocessor_config.json", "processor_config.json"} - {winner}
        assert files[winner]["use"] == "read"
        assert files[loser]["what"] == f"image processing; {winner} wins"


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("config.json", {"model_type": "gpt2"}, "model_type = 'gpt2'; this import takes .*'vision-text-dual-encoder'"),
        ("config.json", {"vision_config__model_type": "swin"}, "vision tower is 'swin'; these can be imported: "),
        ("config.json", {"text_config__model_type": "gpt2"}, "text tower is 'gpt2'; these can be imported: "),
        ("config.json", {"vision_config__hidden_act": "mish"}, "hidden_act = 'mish'; only gelu"),
        ("config.json", {"text_config__hidden_act": "mish"}, "hidden_act.*mish"),
        ("config.json", {"vision_config__num_channels": 1}, "num_channels = 1; only 3"),
        ("config.json", {"vision_config__pooler_act": "relu"}, "pooler_act = 'relu'; only 'tanh'"),
        ("config.json", {"vision_config__image_size": [24, 32]}, "only squares"),
        ("config.json", {"vision_config__num_hidden_layers": 2}, "tensor vision_model.encoder.layer.2"),
        ("config.json", {"vision_config__num_hidden_layers": 4}, r"lack the tensor vision_model.encoder.layer.3"),
        ("config.json", {"vision_config__intermediate_size": 70}, r"shape \[72, 32\], expected \[70, 32\]"),
        ("config.json", {"projection_dim": 21}, r"shape \[20, 32\], expected \[21, 32\]"),
        ("config.json", {"text_config__position_embedding_type": "relative_key"}, "only 'absolute'"),
        ("config.json", {"text_config": None}, "found no text_config"),
        ("config.json", {"text_config__vocab_size": 20}, "tokens, the text tower knows 20"),
        ("preprocessor_config.json", {"do_rescale": False}, "do_rescale = False: only True"),
        ("preprocessor_config.json", {"do_resize": False}, "do_resize = False: only True"),
        ("preprocessor_config.json", {"rescale_factor": 1.0}, "rescale_factor = 1.0"),
        ("preprocessor_config.json", {"resample": 0}, "resample = 0"),
        ("preprocessor_config.json", {"size": {"height": 32, "width": 32}}, "the model takes 24 px"),
        ("preprocessor_config.json", {"size": {"shortest_edge": 24}}, "the model takes 24 px"),
        ("preprocessor_config.json", {"image_mean": [0.5]}, "image_mean = .*three numbers"),
        ("preprocessor_config.json", {"image_std": [0.5, 0.0, 0.5]}, "each must be positive"),
    ],
)
def test_what_cannot_be_mapped_is_refused_and_nothing_is_left(own_checkpoint, tmp_path, file, changes, message):
    edit_json(own_checkpoint / file, **changes)
    check_refused(import_transformers, own_checkpoint, tmp_path / "out", message)


def test_a_processor_that_does_not_normalise_leaves_pixels_in_zero_to_one(own_checkpoint, tmp_path):
    edit_json(own_checkpoint / "preprocessor_config.json", do_normalize=False)
    preprocess = import_transformers(own_checkpoint, tmp_path / "out").preprocess
    assert (preprocess.mean, preprocess.std) == ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


@pytest.mark.parametrize("files", [("tokenizer.json", "tokenizer_config.json"), ("preprocessor_config.json",)])
def test_a_checkpoint_without_tokeniser_or_processor_is_refused(own_checkpoint, tmp_path, files):
    for name in files:
        (own_checkpoint / name).unlink()
    with pytest.raises(ModelError, match="save"):
        import_transformers(own_checkpoint, tmp_path / "out")


@pytest.mark.medium
def test_an_exported_model_loads_in_transformers_and_comes_back_the_same(checkpoint, tmp_path):
    from transformers import AutoImageProcessor, AutoTokenizer, VisionTextDualEncoderModel

    folder, model, _ = checkpoint
    first = import_transformers(folder, tmp_path / "first")
    export_vision_text_dual_encoder(tmp_path / "first", tmp_path / "exported")
    loaded, report = VisionTextDualEncoderModel.from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert_same_features(tmp_path / "first", loaded.eval(), tokenizer)
    assert list(AutoImageProcessor.from_pretrained(tmp_path / "exported").image_mean) == [0.3, 0.4, 0.5]
    again = import_transformers(tmp_path / "exported", tmp_path / "again")
    assert again.model_copy(update={"name": first.name}) == first
    assert model_fingerprint(tmp_path / "first") == model_fingerprint(tmp_path / "again")


def test_a_model_that_transformers_cannot_hold_is_not_exported(make_config, make_model, tmp_path):
    folder = make_model(make_config({"init_values": 0.1, "pooler": "tanh"}))
    with pytest.raises(ModelError, match=r"vision.init_values = 0.1; transformers"):
        export_vision_text_dual_encoder(folder, tmp_path / "out")


@pytest.mark.parametrize(("width", "mlp_width"), [(384, 1536), (1152, 4304), (1408, 6144), (7, 3), (1024, 2731)])
def test_mlp_ratios_round_to_the_width_they_came_from(width, mlp_width):
    assert int(width * mlp_ratio(width, mlp_width)) == mlp_width
