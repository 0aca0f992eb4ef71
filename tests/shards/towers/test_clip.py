"""CLIP of transformers: its checkpoint against its own features, every cut, every part."""

import pytest
import torch
from tokenizers import Tokenizer
from tower_checkpoints import CAPTIONS, END, save_clip
from tower_checks import check_against, check_every_cut, check_every_part_matters, make_batch

from shards.config import load_model_config
from shards.convert import import_transformers


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip") / "checkpoint"
    return folder, save_clip(folder)


@pytest.fixture(scope="module")
def imported(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "clip"
    import_transformers(checkpoint[0], folder)
    return folder


@pytest.fixture
def batch(imported):
    tokenizer = Tokenizer.from_file(str(imported / "tokenizer.json"))
    return make_batch(load_model_config(imported), [tokenizer.encode(caption).ids for caption in CAPTIONS])


def test_an_imported_model_gives_transformers_own_features(checkpoint, imported, batch):
    model, preprocess = checkpoint[1], load_model_config(imported).preprocess
    mean, std = torch.tensor(preprocess.mean), torch.tensor(preprocess.std)

    def images(state):
        return model.get_image_features(((state.values / 255 - mean) / std).permute(0, 3, 1, 2)).pooler_output

    def captions(state):
        ids = torch.nn.utils.rnn.pad_sequence(state.values.split(state.lengths.tolist()), True, END)
        return model.get_text_features(input_ids=ids.long()).pooler_output

    check_against(imported, batch, {"vision": images, "text": captions})


def test_every_cut_gives_the_bits_of_the_unsplit_towers(imported, batch):
    check_every_cut(imported, batch)


def test_no_part_can_be_left_out(imported, batch, tmp_path):
    check_every_part_matters(imported, batch, tmp_path)


def test_the_text_tower_pools_where_the_caption_ends(imported):
    config = load_model_config(imported)
    assert (config.text.family, config.text.eos_token_id, config.text.max_tokens) == ("clip_text", END, 16)
    assert (config.vision.pre_norm, config.vision.activation) == (True, "quick_gelu")
    assert config.preprocess.max_caption_tokens == 16
