"""Captions of any length cost little, and what is cut off would not have been seen."""

import time

import numpy as np
import pytest

from embedder.steps.captions import CaptionEncoder


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
