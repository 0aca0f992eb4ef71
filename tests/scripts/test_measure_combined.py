"""The measurement of combined queries counts what it says, on vectors whose nearest are known."""

from pathlib import Path

import numpy as np
import pytest
import samples
from measure_combined import measure_away, measure_together
from script_runs import found_by

import embedder
from embedder.config import load_config
from embedder.ingest.embed import embed

MODEL = Path(embedder.__file__).parent / "demo_model"
DIRECTIONS = np.eye(40, dtype=np.float32)


def unit(values):
    return (values / np.linalg.norm(values, axis=-1, keepdims=True)).astype(np.float32)


def encode_words(texts):
    """Vectors in which each word of a text is a direction of its own."""
    known = ["person", "woman", "man", "running", "swimming", "moon", "face", "full", "new", "cat", "dog"]
    return unit(np.stack([sum(DIRECTIONS[known.index(word)] for word in text.split()) for text in texts]))


def test_the_image_with_the_swapped_word_is_found_by_both_parts_and_not_by_one():
    captions = [f"{who} {what}" for who in ("person", "woman") for what in ("running", "swimming")]
    captions += ["woman", "person running full", "person swimming full"]  # nearest to the text, and to each image
    vectors = encode_words(captions)
    found = measure_together(captions, vectors, encode_words, 0.5)
    assert found["num_queries"] == 2
    assert (found["image_r1"], found["text_r1"], found["both_r1"]) == (0, 0, 1)


def test_the_share_of_an_unwanted_word_falls():
    captions = ["moon face"] * 8 + ["full moon"] * 6 + ["new moon"] * 6 + ["cat"] * 20
    found = measure_away(captions, encode_words(captions), encode_words, 0.5)
    assert found["num_queries"] == 3
    assert found["unwanted_with"] < found["unwanted_without"]
    assert found["wanted_with"] > 0.5


def test_captions_without_pairs_are_told_as_none():
    vectors = encode_words(["cat", "dog"])
    assert measure_together(["cat", "dog"], vectors, encode_words, 0.5) == {"num_queries": 0}
    assert measure_away(["cat", "dog"], vectors, encode_words, 0.5) == {"num_queries": 0}


@pytest.mark.slow
def test_a_store_is_measured(tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    for number, caption in enumerate(("person running", "woman running", "man running", "a cat")):
        (source / f"{number}.png").write_bytes(samples.image_bytes(number))
        (source / f"{number}.txt").write_text(caption)
    settings = {"model": str(MODEL), "store": str(tmp_path / "s"), "source": [{"path": str(source)}]}
    embed(load_config(overrides=settings | {"engine": "local"}))
    found = found_by("measure_combined.py", tmp_path / "s")
    assert found["together"]["num_queries"] == 4
    assert 0 <= found["together"]["both_r1"] <= found["together"]["both_r10"] <= 1
