"""Word indexes: BM25 by its formula, and the same after updates as after a build."""

import numpy as np
import pytest
from store_states import new_store
from word_stores import QUERIES, by_formula, captions, night, published_captions, published_words

from embedder.config_toml.sections import IndexConfig
from embedder.retrieval import hybrid
from embedder.store.layout import read_current
from embedder.store.tables.tables import RecordTable
from embedder.store_index import word_index, word_parts
from embedder.store_index.analyser import Analyser
from embedder.store_index.keep_words import open_words
from embedder.store_index.word_index import NO_ROW, build_words, open_word_index


@pytest.fixture
def in_small_steps(monkeypatch):
    """Blocks, merges and passes as small as those of few captions, so that there are many."""
    monkeypatch.setattr(word_index, "BLOCK_ROWS", 10)
    monkeypatch.setattr(word_index, "FAN", 3)
    monkeypatch.setattr(word_index, "SMALL_ROWS", 4)
    monkeypatch.setattr(word_index, "ROWS_PER_PIECE", 30)
    monkeypatch.setattr(word_parts, "MERGED_AT_ONCE", 20)
    monkeypatch.setattr(hybrid, "DOCS_AT_ONCE", 7)


def rankings(words, depth: int = 10_000, among=None) -> list[list[int]]:
    return [words.ranking(query, depth, among).tolist() for query in QUERIES]


def rebuilt(files, folder):
    """The same captions, indexed at once."""
    folder.mkdir()
    build_words(RecordTable(files, "embeddings", read_current(files).embeddings), folder, Analyser())
    return hybrid.CaptionWords(open_word_index(folder))


@pytest.mark.medium
def test_the_order_is_that_of_the_formula(tmp_path, in_small_steps):
    files = new_store(tmp_path / "s")
    night(files, dict(enumerate(captions(120))))
    texts, words = published_captions(files), published_words(files)
    assert rankings(words) == [by_formula(texts, query) for query in QUERIES]
    assert len(open_words(files, read_current(files).embeddings).parts) == 1, "a build ends with one part"
    for depth in (1, 3, 10):
        assert rankings(words, depth) == [by_formula(texts, query)[:depth] for query in QUERIES]


@pytest.mark.medium
@pytest.mark.parametrize("share", [0.5, 0.05, 0.0])
def test_the_best_of_those_that_a_condition_allows_are_found(tmp_path, in_small_steps, share):
    files = new_store(tmp_path / "s")
    night(files, dict(enumerate(captions(120))))
    among = np.random.default_rng(1).random(120) < share
    texts, words = published_captions(files), published_words(files)
    assert rankings(words, 3, among) == [by_formula(texts, query, among)[:3] for query in QUERIES]


@pytest.mark.medium
@pytest.mark.parametrize("is_small", [True, False])
def test_many_updates_rank_as_a_build_does(tmp_path, request, is_small):
    if is_small:
        request.getfixturevalue("in_small_steps")
    files = new_store(tmp_path / "s")
    night(files, dict(enumerate(captions(120))))
    others = captions(300, seed=1)
    for number in range(1, 8):
        # Changed, new and retired ones, and one whose caption stays while its vector doesn't.
        changed = {(number * 13 + each) % 120: others[number * 20 + each] for each in range(7)}
        new = {1000 + number * 10 + each: others[number * 30 + each] for each in range(number % 3)}
        night(files, changed | new, number, retired=[1000 + (number - 1) * 10, (number * 17) % 120 + 300])
        texts, words = published_captions(files), published_words(files)
        assert rankings(words) == [by_formula(texts, query) for query in QUERIES]
        assert rankings(words, 4) == rankings(rebuilt(files, tmp_path / f"built{number}"), 4)


@pytest.mark.medium
def test_an_update_analyses_what_changed_and_nothing_else(tmp_path, monkeypatch):
    files = new_store(tmp_path / "s")
    night(files, dict(enumerate(captions(120))))
    seen = []
    monkeypatch.setattr(
        word_index,
        "part_of",
        lambda texts, analyser: seen.extend(texts.to_pylist()) or word_parts.part_of(texts, analyser),
    )
    night(files, {7: "a zebra", 500: "a quagga", 8: None}, 1, retired=[9])
    assert sorted(seen) == ["a quagga", "a zebra"], "their part files were rewritten with all other rows"
    opened = open_words(files, read_current(files).embeddings)
    assert opened.manifest.num_gone == int((opened.rows == NO_ROW).sum())
    assert rankings(published_words(files)) == rankings(rebuilt(files, tmp_path / "built"))


@pytest.mark.medium
def test_captions_that_are_gone_are_dropped_before_they_are_many(tmp_path):
    files = new_store(tmp_path / "s")
    night(files, dict(enumerate(captions(100))))
    for number in range(1, 6):
        night(files, dict.fromkeys(range(number * 10, number * 10 + 10), f"word{number}"), number)
        manifest = open_words(files, read_current(files).embeddings).manifest
        assert manifest.num_gone <= 0.25 * (manifest.num_gone + manifest.num_captions)


def test_captions_of_many_characters_and_words_are_counted(tmp_path, in_small_steps):
    files = new_store(tmp_path / "s")
    night(files, {0: "sea " * 70_000, 1: "sea", 2: " ".join(f"w{each}" for each in range(3000)), 3: "sun " * 300})
    words, texts = published_words(files), published_captions(files)
    assert {texts[row][:4] for row in words.ranking("sea", 9)} == {"sea ", "sea"}
    assert {texts[row][:3] for row in words.ranking("w2999 sun", 9)} == {"w0 ", "sun"}


def test_languages_are_those_of_the_configuration(tmp_path):
    files = new_store(tmp_path / "s")
    texts = {0: "a cat runs", 1: "cats were running", 2: "a dog"}
    night(files, texts, config=IndexConfig(words="english"))
    assert len(published_words(files).ranking("running cat", 9)) == 2
    night(files, {3: "the runner"}, 1)  # by the analyser of this run, so built from scratch
    assert published_captions(files)[published_words(files).ranking("running", 9)[0]] == "cats were running"
    assert open_words(files, read_current(files).embeddings).manifest.analyser == "unicode"


@pytest.mark.medium
def test_equal_captions_are_in_the_order_of_rows(tmp_path, in_small_steps):
    files = new_store(tmp_path / "s")
    night(files, dict.fromkeys(range(50), "the same sea"))
    night(files, dict.fromkeys(range(10, 20), "the same sea"), 1)
    assert published_words(files).ranking("sea", 20).tolist() == list(range(20))


@pytest.mark.parametrize(
    "name",
    [
        *("docs-000001.u32", "counts-000001.u8", "sums-000001.u32", "rows.u32", "lengths-000001.u16"),
        *("terms-000001.u64", "starts-000001.u64"),
    ],
)
@pytest.mark.parametrize("damage", ["altered", "zeros", "cut", "missing"])
def test_a_damaged_file_is_refused(tmp_path, name, damage):
    from index.index_errors import RetrievalError

    files = new_store(tmp_path / "s")
    night(files, dict.fromkeys(range(50), "sea"))
    file = files.folder / "words" / f"{read_current(files).embeddings:06d}" / name
    content = file.read_bytes()
    file.unlink()
    damaged = {"altered": content[:-1] + bytes([content[-1] ^ 1]), "zeros": bytes(len(content)), "cut": content[:-1]}
    if damage != "missing":
        file.write_bytes(damaged[damage])
    with pytest.raises(RetrievalError, match="`embedder index build` makes it again"):
        published_words(files).ranking("sea", 9)
