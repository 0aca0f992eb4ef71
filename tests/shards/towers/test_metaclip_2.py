"""MetaCLIP 2 of transformers: its checkpoint against its own features, every cut, every part."""

import pytest
import torch
from tiny_tokenizers import CAPTIONS, NUM_TOKENS, ODD_CAPTIONS, image_features, save_checkpoint, unigram
from tower_checks import check_against, check_every_cut, check_every_part_matters, make_batch, randomise

from embedder.steps.captions import CaptionEncoder
from shards.config import load_model_config
from shards.convert import import_checkpoint

SIZE, END = 24, 2
TEXT = {
    "vocab_size": NUM_TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 24,
    "bos_token_id": 0,
    "eos_token_id": END,
}
VISION = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": SIZE,
    "patch_size": 8,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Folder, transformers' model and tokeniser."""
    from transformers import MetaClip2Config, MetaClip2Model

    folder = tmp_path_factory.mktemp("hf") / "metaclip"
    model = randomise(MetaClip2Model(MetaClip2Config(text_config=TEXT, vision_config=VISION, projection_dim=20)))
    tokenizer = unigram()
    save_checkpoint(folder, model, tokenizer, SIZE)
    return folder, model, tokenizer


@pytest.fixture(scope="module")
def imported(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "model"
    import_checkpoint(checkpoint[0], folder)
    return folder


def batch_of(folder, captions):
    config = load_model_config(folder)
    tokenizer_json = (folder / "tokenizer.json").read_text(encoding="utf-8")
    encoder = CaptionEncoder(tokenizer_json, config.preprocess.max_caption_tokens, config.text.end_id)
    return make_batch(config, [encoder.encode(caption).tolist() for caption in captions])


def test_an_imported_model_gives_transformers_own_features(checkpoint, imported):
    _, model, tokenizer = checkpoint
    config = load_model_config(imported)

    def captions(_):
        inputs = tokenizer(ODD_CAPTIONS, padding=True, truncation=True, max_length=24, return_tensors="pt")
        return model.get_text_features(**inputs).pooler_output

    expected = {"vision": image_features(model, config.preprocess), "text": captions}
    check_against(imported, batch_of(imported, ODD_CAPTIONS), expected)


def test_every_cut_gives_the_bits_of_the_unsplit_towers(imported):
    check_every_cut(imported, batch_of(imported, CAPTIONS))


def test_no_part_can_be_left_out(imported, tmp_path):
    check_every_part_matters(imported, batch_of(imported, CAPTIONS), tmp_path)


def test_a_caption_ends_with_the_id_that_clip_takes_for_a_mistake(imported):
    config = load_model_config(imported)
    assert (config.text.family, config.text.eos_token_id, config.vision.pre_norm) == ("metaclip_2_text", END, True)
    ids = batch_of(imported, CAPTIONS).text
    assert (ids.values[ids.lengths.cumsum(0) - 1] == END).all()
    assert int(torch.max(ids.values)) > END
