"""Queries with words that the model's tokeniser doesn't know: in Python, at the command line and by the service."""

import re
from pathlib import Path

import library_checkpoints as checkpoints
import numpy as np
import pytest
from command_runs import run_here
from running_server import running
from served import make_store

import embedder
from embedder.encoders.query_encoder import QueryEncoder
from embedder.models.model_folder import open_model
from embedder.steps.caption_encoder import CaptionEncoder
from shards.convert import import_checkpoint
from shards.train_tokenizer import train_tokenizer

DEMO_MODEL = Path(embedder.__file__).parent / "demo_model"
UNKNOWN = "снег 猫"
MESSAGE = (
    f"the model's tokeniser knows none of these words: {UNKNOWN}; use words that the model was trained with; "
    "docs/models.md has the languages of others"
)


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory):
    """A store of a few images, by a model whose tokeniser knows only letters of English captions."""
    folder = tmp_path_factory.mktemp("unknown")
    make_store(folder, tiny_model, num_images=4, num_clips=0)
    return folder


@pytest.fixture(scope="module", params=["onnx", "torch"])
def store(request, folder):
    """The store, whose queries are encoded by ONNX Runtime, as in a light installation, or by torch."""
    store = embedder.open_store(folder / "store")
    if request.param == "torch":
        vars(store)["encoder"] = store._torch_encoder()
    assert store.encoder.kind == request.param
    return store


def test_hits_bear_the_warning_of_their_own_query(store):
    hits = store.search(UNKNOWN, k=2)
    assert len(hits) == 2
    assert hits.warnings == [MESSAGE]
    answers = store.search(["a red car", UNKNOWN, "a car"], k=1)
    assert [each.warnings for each in answers] == [[], [MESSAGE], []]
    assert store.search(" a red car ", k=1).warnings == []


def test_an_unknown_word_among_others_is_named_and_changes_no_vector(store):
    (line,) = store.search("a red 猫 car снег", k=1).warnings
    assert line.startswith("the model's tokeniser doesn't know 猫, снег, left out of the query; use words")
    plain, mixed = store.encode_text(["a red car", "a red 猫 car снег"])
    assert np.array_equal(plain, mixed)
    (line,) = store.search("a réd car", k=1).warnings
    assert line.startswith("the model's tokeniser knows réd in part; use words")


def test_a_text_that_is_only_spelt_out_has_a_line(tmp_path):
    """A tokeniser of bytes knows every word, and was trained on few languages' words."""
    checkpoints.clip(tmp_path / "checkpoint")
    import_checkpoint(tmp_path / "checkpoint", tmp_path / "model")
    encoder = QueryEncoder(open_model(str(tmp_path / "model")))
    for text, script in (("снег", "Cyrillic"), ("红色的汽车", "Chinese characters"), ("a λόγος", "Greek")):
        assert encoder.warning(text) == (
            f"the model hardly reads {script}: its tokeniser spells the text out by letters or bytes; use words that "
            "the model was trained with; docs/models.md has the languages of others"
        )
    assert encoder.warning("a red car 猫") is None


@pytest.mark.parametrize("asked", ["smiling cat.", "smiling cat!", "smiling cat …", "smiling cat。", "smiling cat?!"])
def test_marks_at_the_end_change_no_vector_of_the_shipped_model(asked):
    encoder = QueryEncoder(open_model(str(DEMO_MODEL)))
    plain, marked = encoder.encode_text(["smiling cat", asked])
    assert np.array_equal(plain, marked)
    assert encoder.warning(asked) is None


def test_marks_that_captions_had_stay():
    of_sentences = CaptionEncoder(train_tokenizer(["a red car.", "a cat.", "is it rain?", "no car."] * 20, 60), 32)
    assert [of_sentences.query(text).text for text in ("a cat.", "a cat!")] == ["a cat.", "a cat"]
    queries = CaptionEncoder((DEMO_MODEL / "tokenizer.json").read_text(), 32)
    assert [queries.query(text).text for text in ("...", "u.s.", "flag: Japan")] == ["...", "u.s.", "flag: Japan"]


def test_other_queries_have_no_words(store, folder):
    image = folder / "in" / "pictures" / "0000.png"
    for hits in (store.search(image, k=1), store.search(np.asarray(store.encode_text(["猫"])[0]), k=1)):
        assert hits.warnings == []


def test_long_and_hostile_texts_are_shown_in_short(store):
    (line,) = store.search("猫\x1b[2J\n" * 400 + "\u202e", k=1).warnings
    assert line.isprintable()
    assert len(line) < 400


def test_a_notebook_shows_it_above_the_images(store):
    assert store.search("<b>猫</b>".replace("b", "猫"), k=1)._repr_html_().startswith("<p>the model&#x27;s tokeniser")


def test_the_service_answers_with_it_and_remembers_it(folder):
    with running(folder / "store") as url, embedder.connect(url) as remote:
        for _ in range(2):
            found = remote.search([UNKNOWN, "a red car"], k=1)
            assert [hits.warnings for hits in found] == [[MESSAGE], []]
            assert found[0].to_arrow().num_rows == 1


def test_the_command_says_it_in_a_line_before_the_table(folder):
    ended = run_here("search", UNKNOWN, "--store", folder / "store", "-k", "1")
    assert ended.code == 0
    assert f"warning: {MESSAGE}" in " ".join(ended.stdout.split())
    assert run_here("search", UNKNOWN, "--store", folder / "store", "--json").found["warnings"] == [MESSAGE]
    assert run_here("search", "a red car", "--store", folder / "store", "--json").found["warnings"] == []


def test_a_query_beyond_the_limit_of_the_model_says_what_is_read(store):
    limit = open_model(store.info.model).config.preprocess.max_caption_tokens
    long = "a red car " * 1000
    (line,) = store.search(long, k=1).warnings
    found = re.fullmatch(
        rf"the model reads {limit} tokens: of the text's 3,000 words the first (\d+), and the rest is cut", line
    )
    num_read = int(found[1])
    assert 1 <= num_read < limit
    words = long.split()
    read = store.encoder.encode_text([" ".join(words[:num_read]), long])
    assert np.allclose(read[0], read[1], atol=1e-6), "what is named is what was read"
    assert store.search(" ".join(words[: num_read - 1]), k=1).warnings == []
