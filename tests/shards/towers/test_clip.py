"""CLIP of transformers: its checkpoint against its own features, every cut, every part."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tower_checks import check_against, check_every_cut, check_every_part_matters, make_batch, randomise

from shards.config import load_model_config
from shards.convert import import_transformers

NUM_TOKENS, SIZE = 300, 32
START, END = NUM_TOKENS - 2, NUM_TOKENS - 1
TEXT = {
    "vocab_size": NUM_TOKENS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
    "bos_token_id": START,
    "eos_token_id": END,
    "pad_token_id": END,
}
VISION = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": SIZE,
    "patch_size": 8,
}
CAPTIONS = ["A red car", "two cats sleep on a sofa", "fruit"]


def byte_level_bpe() -> Tokenizer:
    """Tokeniser as CLIP has it: byte-level BPE in lower case, between a start and an end token."""
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CAPTIONS, trainers.BpeTrainer(vocab_size=START, initial_alphabet=alphabet))
    for number in range(tokenizer.get_vocab_size(), START):
        tokenizer.add_tokens([f"word{number}"])
    tokenizer.add_special_tokens(["<|startoftext|>", "<|endoftext|>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|startoftext|> $A <|endoftext|>",
        special_tokens=[("<|startoftext|>", START), ("<|endoftext|>", END)],
    )
    return tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

    folder = tmp_path_factory.mktemp("clip") / "checkpoint"
    torch.manual_seed(0)
    model = randomise(CLIPModel(CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=24)))
    model.save_pretrained(folder)
    size = {"height": SIZE, "width": SIZE}
    CLIPImageProcessor(size={"shortest_edge": SIZE}, crop_size=size).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(byte_level_bpe().to_str())
    return folder, model


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
