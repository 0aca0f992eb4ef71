"""BERT, RoBERTa, XLM-RoBERTa, CamemBERT and Chinese-CLIP of transformers against transformers' own features."""

import shutil
from dataclasses import replace

import pytest
import torch
from library_checkpoints import SIZE, SMALL_TEXT, WIDE_VISION
from safetensors.torch import load_file, save_file
from tiny_tokenizers import (
    CAPTIONS,
    NUM_TOKENS,
    ODD_CAPTIONS,
    byte_level_bpe,
    image_features,
    padded,
    save_checkpoint,
    unigram,
    wordpiece,
)
from tokenizers import Tokenizer
from tower_checkpoints import edit_json
from tower_checks import (
    LEAST_MOVE,
    check_against,
    check_every_cut,
    check_every_part_matters,
    check_refused,
    embed_whole,
    make_batch,
    randomise,
    with_padding,
)

from shards.convert import export_vision_text_dual_encoder, import_transformers
from shards.fingerprint import model_fingerprint
from shards.layouts import Padding
from shards.model_config import load_model_config
from shards.model_errors import ModelError
from shards.towers.bert import BertTower, RobertaTower

NUM_POSITIONS = SMALL_TEXT["max_position_embeddings"]
# By `model_type`: transformers' classes of both configurations, what differs in the text's, and the tokeniser.
FAMILIES = {
    "bert": ("CLIPVisionConfig", "BertConfig", {}, wordpiece),
    "roberta": ("ViTConfig", "RobertaConfig", {"type_vocab_size": 1, "layer_norm_eps": 1e-5}, byte_level_bpe),
    "xlm-roberta": ("ViTConfig", "XLMRobertaConfig", {"type_vocab_size": 1, "hidden_act": "gelu_new"}, unigram),
    "camembert": ("ViTConfig", "CamembertConfig", {}, unigram),
    "chinese_clip_text_model": ("ChineseCLIPVisionConfig", "ChineseCLIPTextConfig", {}, wordpiece),
}


def make_their_model(vision_class, text_class, changes):
    import transformers

    vision = getattr(transformers, vision_class)(**WIDE_VISION)
    text = getattr(transformers, text_class)(**(SMALL_TEXT | changes))
    if text_class == "ChineseCLIPTextConfig":
        config = transformers.ChineseCLIPConfig(
            vision_config=vision.to_dict(), text_config=text.to_dict(), projection_dim=20
        )
        return randomise(transformers.ChineseCLIPModel(config))
    config = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(vision, text, projection_dim=20)
    return randomise(transformers.VisionTextDualEncoderModel(config))


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    """Folder, transformers' model and tokeniser."""
    *classes, make_tokenizer = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("hf") / request.param
    model, tokenizer = make_their_model(*classes), make_tokenizer()
    save_checkpoint(folder, model, tokenizer, SIZE)
    return folder, model, tokenizer


@pytest.fixture(scope="module")
def imported(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "model"
    import_transformers(checkpoint[0], folder)
    return folder


@pytest.fixture
def batch(imported):
    tokenizer = Tokenizer.from_file(str(imported / "tokenizer.json"))
    return make_batch(load_model_config(imported), [tokenizer.encode(caption).ids for caption in CAPTIONS])


def their_features(model, config):
    def captions(state):
        return model.get_text_features(**padded(state, config.text.padding_id)).pooler_output

    return {"vision": image_features(model, config.preprocess), "text": captions}


def test_an_imported_model_gives_transformers_own_features(checkpoint, imported, batch):
    check_against(imported, batch, their_features(checkpoint[1], load_model_config(imported)))


@pytest.mark.medium
def test_every_cut_gives_the_bits_of_the_unsplit_towers(imported, batch):
    check_every_cut(imported, batch)


@pytest.mark.slow
def test_no_part_can_be_left_out(imported, batch, tmp_path):
    check_every_part_matters(imported, batch, tmp_path)


def test_the_mask_of_padding_matters(imported, batch, monkeypatch):
    batch = with_padding(batch)
    before, lay_out = embed_whole(imported, batch)["text"], Padding.of
    monkeypatch.setattr(Padding, "of", lambda lengths: replace(lay_out(lengths), mask=None))
    assert float((embed_whole(imported, batch)["text"] - before).abs().max()) > LEAST_MOVE


def test_captions_keep_transformers_own_token_ids(checkpoint, imported):
    ours = Tokenizer.from_file(str(imported / "tokenizer.json"))
    for caption in ODD_CAPTIONS:
        assert ours.encode(caption).ids == checkpoint[2](caption)["input_ids"], caption


def test_captions_are_as_long_as_the_position_table_has_places(checkpoint, imported):
    config = load_model_config(imported)
    longest = NUM_POSITIONS if config.text.family == "bert" else NUM_POSITIONS - 2
    assert config.text.max_tokens == config.preprocess.max_caption_tokens == longest
    batch = make_batch(config, [[*range(5, 5 + longest)], [7, 8, 9]])
    check_against(imported, batch, their_features(checkpoint[1], config))
    with pytest.raises(ModelError, match=f"a caption of {longest + 1} tokens, the model takes {longest}"):
        embed_whole(imported, make_batch(config, [[*range(5, 6 + longest)]]))


def test_a_token_of_padding_inside_a_caption_counts_as_in_transformers(checkpoint, imported):
    config = load_model_config(imported)
    padding = config.text.padding_id
    batch = make_batch(config, [[5, padding, 6, 7], [8, 9, padding], [5, 6, 7, 8, 9, 10]])
    check_against(imported, batch, their_features(checkpoint[1], config))


def test_a_table_of_514_positions_takes_512_tokens():
    assert RobertaTower().max_tokens == 512
    assert BertTower().max_tokens == 512
    with pytest.raises(ValueError, match="leaves no position behind pad_token_id"):
        RobertaTower(max_position_embeddings=2)


@pytest.mark.medium
@pytest.mark.parametrize("checkpoint", ["bert"], indirect=True)
@pytest.mark.parametrize(
    "old_names",
    [
        {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"},
        {"vision_model.": "vision_model.vision_model."},
    ],
)
def test_names_that_older_versions_wrote_are_found(checkpoint, tmp_path, old_names):
    folder = shutil.copytree(checkpoint[0], tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    for new, old in old_names.items():
        tensors = {name.replace(new, old): each for name, each in tensors.items()}
    assert tensors.keys() != load_file(folder / "model.safetensors").keys()
    tensors |= {f"{side}_model.embeddings.position_ids": torch.arange(9)[None] for side in ("vision", "text")}
    save_file(tensors, folder / "model.safetensors")
    import_transformers(checkpoint[0], tmp_path / "new")
    import_transformers(folder, tmp_path / "old")
    assert model_fingerprint(tmp_path / "old") == model_fingerprint(tmp_path / "new")


@pytest.mark.parametrize("checkpoint", ["roberta"], indirect=True)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_decoder": True}, "roberta: is_decoder = True; only False can be imported"),
        ({"pad_token_id": None}, "pad_token_id: .*valid integer"),
        ({"pad_token_id": NUM_TOKENS}, "leaves no position behind pad_token_id|outside the vocabulary"),
        ({"model_type": "bert", "type_vocab_size": 2}, r"shape \[1, 32\], expected \[2, 32\]"),
    ],
)
def test_what_cannot_be_mapped_is_refused_and_nothing_is_left(checkpoint, tmp_path, changes, message):
    folder = shutil.copytree(checkpoint[0], tmp_path / "hf")
    edit_json(folder / "config.json", **{f"text_config__{key}": value for key, value in changes.items()})
    check_refused(import_transformers, folder, tmp_path / "out", message)


@pytest.mark.parametrize("checkpoint", ["roberta", "xlm-roberta"], indirect=True)
def test_an_exported_model_gives_transformers_the_same_features(imported, batch, tmp_path):
    from transformers import VisionTextDualEncoderModel

    export_vision_text_dual_encoder(imported, tmp_path / "out")
    loaded = VisionTextDualEncoderModel.from_pretrained(tmp_path / "out").eval()
    check_against(imported, batch, their_features(loaded, load_model_config(imported)))
