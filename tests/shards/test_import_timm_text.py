"""A timm checkpoint and the folder of a text tower, joined under fresh projections."""

import json

import pytest
import torch
from library_checkpoints import save_timm
from safetensors.torch import load_file, save_file
from tiny_tokenizers import NUM_TOKENS, unigram, wordpiece
from torch.testing import assert_close
from tower_checks import randomise

from shards.activations import Batch, TowerState
from shards.convert import import_timm_and_text
from shards.fingerprint import model_fingerprint
from shards.model_config import load_model_config
from shards.model_errors import ModelError
from shards.plan import plan_shards
from shards.reference import load_towers
from shards.shard import load_shard
from shards.shard_specs import whole_model

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2}


def save_vit(folder, architecture="vit_small_patch16_224", **model_args):
    """Save as timm does for the hub, with every weight random and a classifier to leave behind."""
    import timm

    model = randomise(timm.create_model(architecture, num_classes=7, **model_args))
    save_timm(model, folder, **model_args)
    return model


def save_albert(folder, tokenizer_json, class_name="AlbertModel", **changes):
    import transformers
    from tokenizers import Tokenizer

    config = transformers.AlbertConfig(
        **(
            {"vocab_size": 110, "embedding_size": 16, "hidden_size": 32, "num_hidden_layers": 3}
            | {"num_attention_heads": 2, "intermediate_size": 40, "max_position_embeddings": 40}
            | changes
        )
    )
    torch.manual_seed(2)
    model = getattr(transformers, class_name)(config).eval()
    model.save_pretrained(folder)
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer_json), **special
    ).save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def albert(tmp_path_factory, tokenizer_json):
    folder = tmp_path_factory.mktemp("albert") / "albert"
    return folder, save_albert(folder, tokenizer_json)


def embed(folder, pixels, ids):
    config = load_model_config(folder)
    batch = Batch(
        TowerState(pixels, torch.ones(len(pixels), dtype=torch.int64)),
        TowerState(ids.flatten().int(), torch.tensor([ids.shape[1]] * len(ids))),
    )
    return load_shard(folder, whole_model(config))(batch)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("vit_small_patch16_224", {}),
        ("deit3_small_patch16_224", {}),
        ("vit_small_patch16_224", {"dynamic_img_size": True, "global_pool": "avg"}),
        ("vit_small_patch16_224", {"global_pool": "avgmax", "final_norm": False, "qkv_bias": False}),
    ],
)
def test_embeddings_are_those_of_timm_and_transformers_under_the_fresh_projections(
    albert, tmp_path, architecture, changes
):
    vit = save_vit(tmp_path / "vit", architecture, **SMALL, **changes)
    config = import_timm_and_text(tmp_path / "vit", albert[0], tmp_path / "out", 24, seed=5)
    assert config.trained is False
    assert (config.vision.image_size, config.vision.depth, config.vision.width) == (32, 3, 32)
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (3, 32, 32, 3), dtype=torch.uint8, generator=generator)
    ids = torch.randint(5, 100, (2, 9), generator=generator)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    mean, std = torch.tensor(vit.pretrained_cfg["mean"]), torch.tensor(vit.pretrained_cfg["std"])
    with torch.no_grad():
        scaled = ((pixels / 255 - mean) / std).permute(0, 3, 1, 2)
        features = vit.forward_head(vit.forward_features(scaled), pre_logits=True)
        images = features @ weights["vision_head.projection.weight"].T
        captions = albert[1](input_ids=ids).pooler_output @ weights["text_head.projection.weight"].T
    found = embed(tmp_path / "out", pixels, ids)
    normalise = torch.nn.functional.normalize
    assert_close(found.vision.values, normalise(images), atol=2e-6, rtol=0)
    assert_close(found.text.values, normalise(captions), atol=2e-6, rtol=0)
    for stage in plan_shards(config, 3).stages:
        load_shard(tmp_path / "out", stage.spec)


def test_projections_come_from_the_seed_and_towers_from_the_checkpoints(albert, tmp_path):
    save_vit(tmp_path / "vit", **SMALL)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        import_timm_and_text(tmp_path / "vit", albert[0], tmp_path / name, 24, seed=seed)
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert model_fingerprint(tmp_path / "a") == model_fingerprint(tmp_path / "b") != model_fingerprint(tmp_path / "c")
    different = {name for name in a if not torch.equal(a[name], c[name])}
    assert different == {"vision_head.projection.weight", "text_head.projection.weight"}
    assert a.keys() == b.keys()


def test_preprocessing_is_timms(albert, tmp_path):
    save_vit(tmp_path / "vit", "vit_base_patch16_clip_224", **SMALL)
    preprocess = import_timm_and_text(tmp_path / "vit", albert[0], tmp_path / "out", 24).preprocess
    assert preprocess.mean == pytest.approx((0.48145466, 0.4578275, 0.40821073))
    assert (preprocess.resize, preprocess.interpolation, preprocess.image_size) == ("crop", "bicubic", 32)
    assert preprocess.resampler == "pillow"
    assert preprocess.max_caption_tokens == 40


@pytest.mark.parametrize("class_name", ["AlbertForMaskedLM", "AlbertForPreTraining"])
def test_an_albert_with_heads_leaves_them_behind(tokenizer_json, tmp_path, class_name):
    save_vit(tmp_path / "vit", **SMALL)
    model = save_albert(tmp_path / "albert", tokenizer_json, class_name)
    config = import_timm_and_text(tmp_path / "vit", tmp_path / "albert", tmp_path / "out", 24)
    assert config.text.pool == ("mean" if class_name == "AlbertForMaskedLM" else "pooler")
    found = load_towers(tmp_path / "out").text.state_dict()
    expected = model.albert.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize(
    ("class_name", "config_name", "tokenizer", "inner", "pool"),
    [
        ("BertModel", "BertConfig", wordpiece, None, "pooler"),
        ("BertForPreTraining", "BertConfig", wordpiece, "bert", "pooler"),
        ("XLMRobertaForMaskedLM", "XLMRobertaConfig", unigram, "roberta", "mean"),
        ("DistilBertForMaskedLM", "DistilBertConfig", wordpiece, "distilbert", "mean"),
    ],
)
def test_other_text_towers_join_too(tmp_path, class_name, config_name, tokenizer, inner, pool):
    import transformers

    save_vit(tmp_path / "vit", **SMALL)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    inner_size = {"hidden_dim": 40} if config_name == "DistilBertConfig" else {"intermediate_size": 40}
    config = getattr(transformers, config_name)(vocab_size=NUM_TOKENS, **sizes, **inner_size)
    model = randomise(getattr(transformers, class_name)(config))
    model.save_pretrained(tmp_path / "text")
    tokenizer().save_pretrained(tmp_path / "text")
    config = import_timm_and_text(tmp_path / "vit", tmp_path / "text", tmp_path / "out", 24)
    assert config.text.pool == pool
    tower = getattr(model, inner) if inner else model
    ids = torch.randint(5, 80, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        output = tower(input_ids=ids)
        pooled = output.pooler_output if pool == "pooler" else output.last_hidden_state.mean(1)
        captions = pooled @ load_file(tmp_path / "out" / "model.safetensors")["text_head.projection.weight"].T
    found = embed(tmp_path / "out", torch.zeros((1, 32, 32, 3), dtype=torch.uint8), ids)
    assert_close(found.text.values, torch.nn.functional.normalize(captions), atol=2e-6, rtol=0)


def test_checkpoints_of_another_kind_are_refused(albert, tmp_path):
    save_vit(tmp_path / "vit", **SMALL)
    with pytest.raises(ModelError, match="this is a text tower; SRC of an import with --text"):
        import_timm_and_text(albert[0], albert[0], tmp_path / "out", 24)
    with pytest.raises(ModelError, match="--text takes a text tower, and this is one for images"):
        import_timm_and_text(tmp_path / "vit", tmp_path / "vit", tmp_path / "out", 24)


def test_pickled_weights_are_not_read(albert, tmp_path):
    save_vit(tmp_path / "vit", **SMALL)
    tensors = load_file(tmp_path / "vit" / "model.safetensors")
    (tmp_path / "vit" / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "vit" / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickled checkpoints aren't read"):
        import_timm_and_text(tmp_path / "vit", albert[0], tmp_path / "out", 24)


def test_weights_that_timm_cannot_load_are_refused_in_one_line(albert, tmp_path):
    save_vit(tmp_path / "vit", **SMALL)
    save_file({"blocks.0.norm1.weight": torch.ones(32)}, tmp_path / "vit" / "model.safetensors")
    with pytest.raises(ModelError, match="timm can't load 'vit_small_patch16_224'") as caught:
        import_timm_and_text(tmp_path / "vit", albert[0], tmp_path / "out", 24)
    assert "\n" not in str(caught.value)
    config = json.loads((tmp_path / "vit" / "config.json").read_text())
    (tmp_path / "vit" / "config.json").write_text(json.dumps(config | {"architecture": "vit_of_tomorrow"}))
    with pytest.raises(ModelError, match="vit_of_tomorrow"):
        import_timm_and_text(tmp_path / "vit", albert[0], tmp_path / "out", 24)
