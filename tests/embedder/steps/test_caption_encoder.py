"""Captions of any length cost little, and what is cut off would not have been seen."""

import time

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from embedder.steps.caption_encoder import CaptionEncoder


@pytest.fixture
def encoder(tiny_model):
    return CaptionEncoder((tiny_model / "tokenizer.json").read_text(encoding="utf-8"), 32)


@pytest.mark.parametrize("text", ["w" * 20_000_000, "a red car " * 2_000_000, "\u4e2d" * 5_000_000])
def test_an_endless_caption_is_tokenised_in_time(encoder, text):
    begun_s = time.process_time()
    ids = encoder.encode(text)
    assert time.process_time() - begun_s < 5, "seconds of CPU"
    assert 2 < len(ids) <= 32


def test_the_first_words_of_a_long_caption_are_what_is_embedded(encoder):
    words = "seven white horses and a red car " * 10
    assert np.array_equal(encoder.encode(words), encoder.encode(words * 10_000))


def words(**padding):
    """Tokeniser of words between <start> and <end>."""
    names = ["<pad>", "<unk>", "<start>", "<end>", "a", "red", "car"]
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(names[:4])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<start> $A <end>", special_tokens=[("<start>", 2), ("<end>", 3)]
    )
    if padding:
        tokenizer.enable_padding(pad_id=0, pad_token="<pad>", **padding)
    return tokenizer.to_str()


@pytest.mark.parametrize(
    ("caption", "ids"),
    [
        ("a red car", [2, 4, 5, 6, 3]),
        ("a <end> car", [2, 4, 3]),
        ("<end>", [2, 3]),
        ("<start> a", [2, 2, 4, 3]),
        ("a a a a a a a", [2, 4, 4, 4, 4, 3]),
        ("", [2, 3]),
    ],
)
def test_nothing_follows_the_first_end_token_where_a_tower_pools_there(caption, ids):
    assert CaptionEncoder(words(), 6, end_id=3).encode(caption).tolist() == ids


def test_all_tokens_count_for_other_towers():
    assert CaptionEncoder(words(), 8).encode("a <end> car").tolist() == [2, 4, 3, 6, 3]


@pytest.mark.parametrize(
    ("direction", "ids"), [("right", [2, 4, 6, 3, 0, 0]), ("left", [0, 0, 2, 4, 6, 3])], ids=["right", "left"]
)
def test_a_tokeniser_of_a_fixed_length_pads_to_the_models_limit(direction, ids):
    encoder = CaptionEncoder(words(length=9, direction=direction), 6)
    assert encoder.encode("a car").tolist() == ids
    assert encoder.encode("a a a a a a a").tolist() == [2, 4, 4, 4, 4, 3]


def test_a_tokeniser_that_pads_to_the_longest_of_a_batch_pads_nothing():
    assert CaptionEncoder(words(pad_to_multiple_of=8), 6).encode("a car").tolist() == [2, 4, 6, 3]
