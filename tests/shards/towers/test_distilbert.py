"""DistilBERT of transformers: joined to a timm ViT, against its own token mean; alone in a dual encoder, refused."""

import pytest
import torch
from library_checkpoints import save_timm
from safetensors.torch import load_file
from tiny_tokenizers import CAPTIONS, NUM_TOKENS, ODD_CAPTIONS, padded, save_checkpoint, wordpiece
from tokenizers import Tokenizer
from tower_checks import check_against, check_every_cut, check_every_part_matters, make_batch, randomise

from shards.config import load_model_config
from shards.convert import import_timm_and_text, import_transformers
from shards.errors import ModelError
from shards.ranges import LayerRange
from shards.towers.distilbert import DistilBertTower

TEXT = {
    "vocab_size": NUM_TOKENS,
    "dim": 32,
    "n_layers": 3,
    "n_heads": 4,
    "hidden_dim": 48,
    "max_position_embeddings": 40,
    "activation": "relu",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Folder of a timm ViT and of a DistilBERT with a head, and transformers' model."""
    import timm
    from transformers import DistilBertConfig, DistilBertForMaskedLM

    folder = tmp_path_factory.mktemp("checkpoints")
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    vit = randomise(timm.create_model("vit_small_patch16_224", num_classes=7, **sizes))
    save_timm(vit, folder / "vit", **sizes)
    model = randomise(DistilBertForMaskedLM(DistilBertConfig(**TEXT)))
    model.save_pretrained(folder / "text")
    wordpiece().save_pretrained(folder / "text")
    return folder, model.distilbert


@pytest.fixture(scope="module")
def imported(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "model"
    import_timm_and_text(checkpoint[0] / "vit", checkpoint[0] / "text", folder, 20)
    return folder


@pytest.fixture
def batch(imported):
    tokenizer = Tokenizer.from_file(str(imported / "tokenizer.json"))
    return make_batch(load_model_config(imported), [tokenizer.encode(caption).ids for caption in CAPTIONS])


def test_an_imported_model_gives_the_token_mean_of_transformers(checkpoint, imported, batch):
    projection = load_file(imported / "model.safetensors")["text_head.projection.weight"]

    def captions(state):
        inputs = padded(state, 0)
        hidden, mask = checkpoint[1](**inputs).last_hidden_state, inputs["attention_mask"][:, :, None]
        return (hidden * mask).sum(1) / mask.sum(1) @ projection.T

    check_against(imported, batch, {"text": captions})


def test_every_cut_gives_the_bits_of_the_unsplit_towers(imported, batch):
    check_every_cut(imported, batch)


def test_no_part_can_be_left_out(imported, batch, tmp_path):
    check_every_part_matters(imported, batch, tmp_path)


def test_captions_keep_transformers_own_token_ids(checkpoint, imported):
    from transformers import AutoTokenizer

    ours = Tokenizer.from_file(str(imported / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(checkpoint[0] / "text")
    for caption in ODD_CAPTIONS:
        assert ours.encode(caption).ids == theirs(caption)["input_ids"], caption


def test_names_and_shapes_of_all_tensors_are_transformers_own():
    tower = DistilBertTower()
    with torch.device("meta"):
        built = tower.build().state_dict()
    shapes = tower.shapes(LayerRange(0, tower.num_layers))
    assert shapes == {name: tuple(tensor.shape) for name, tensor in built.items()}


def test_a_dual_encoder_which_transformers_cannot_pool_is_refused(tmp_path):
    from transformers import (
        DistilBertConfig,
        VisionTextDualEncoderConfig,
        VisionTextDualEncoderModel,
        ViTConfig,
    )

    vision = ViTConfig(
        hidden_size=24, num_hidden_layers=1, num_attention_heads=4, intermediate_size=40, image_size=24, patch_size=8
    )
    config = VisionTextDualEncoderConfig.from_vision_text_configs(vision, DistilBertConfig(**TEXT), projection_dim=20)
    model = VisionTextDualEncoderModel(config)
    with pytest.raises(AttributeError, match="pooler_output"):
        model.get_text_features(input_ids=torch.tensor([[2, 7, 3]]))
    save_checkpoint(tmp_path / "hf", model, wordpiece(), 24)
    with pytest.raises(ModelError, match="the text tower is 'distilbert': it has no pooler"):
        import_transformers(tmp_path / "hf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
