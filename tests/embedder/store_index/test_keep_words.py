"""Word index of each publication: made, kept through every operation, and never of other rows than those published."""

from contextlib import suppress
from itertools import count

import pytest
from index_stores import NO_FIRST_INDEX
from store_states import Killed, build_store_index, dying, new_store
from word_stores import QUERIES, by_formula, captions, night, published_captions, published_words

from embedder.config_toml.sections import IndexConfig
from embedder.plugins.maintain.purge.purge import purge as run_purge
from embedder.plugins.maintain.vacuum import vacuum
from embedder.retrieval.queries import SearchOptions
from embedder.retrieval.store_api import open_store
from embedder.storage.user_cache import cache_folder
from embedder.store.files import StoreFiles
from embedder.store.layout import read_current
from embedder.store.maintenance.compact import PartTarget, compact
from embedder.store.maintenance.rollback import rollback
from embedder.store_index import word_index
from embedder.store_index.analyser import hash_term
from embedder.store_index.index_versions import COPIES_FOLDER
from embedder.store_index.keep_index import index_choice, same_index_and_words
from embedder.store_index.keep_words import ensure_words, has_words, open_words
from index.index_errors import RetrievalError


@pytest.fixture(autouse=True)
def _own_copies(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def files(tmp_path) -> StoreFiles:
    files = new_store(tmp_path / "store")
    night(files, dict(enumerate(captions(60))))
    return files


def assert_ranks(files: StoreFiles) -> None:
    """What is published has a word index, which ranks its captions by the formula."""
    texts, words = published_captions(files), published_words(files)
    assert [words.ranking(query, 99).tolist() for query in QUERIES] == [by_formula(texts, query) for query in QUERIES]


def versions(files: StoreFiles) -> set[int]:
    return {int(info.path.split("/")[1]) for info in files.list("words")}


def holds(files: StoreFiles, word: str) -> bool:
    """Whether any file of any word index has a list of the word."""
    found = [open_words(files, version).parts for version in versions(files)]
    return any(part.span(hash_term(word)) != (0, 0) for parts in found for part in parts)


def test_a_search_by_words_reads_the_published_index_and_builds_none(files):
    night(files, {3: "a zebra"}, 1)
    store = open_store(files.address)
    vector = store.searcher.snapshot.sample[10]
    hits = store.searcher.search_batch(vector[None], SearchOptions(k=60, hybrid=True), texts=["zebra"])[0]
    (hit,) = [each for each in hits if each.words_rank]
    assert (hit.item_id, hit.words_rank) == ("0003.jpg", 1)
    assert list(cache_folder(COPIES_FOLDER).glob("words-*")) == []


@pytest.mark.medium
def test_a_rollback_brings_the_words_back(files):
    first = read_current(files).run_id
    night(files, dict.fromkeys(range(20), "a zebra"), 1, retired=[30])
    rollback(files, first, index_choice(files))
    assert len(published_words(files).ranking("zebra", 9)) == 0
    assert_ranks(files)


@pytest.mark.medium
def test_a_compaction_keeps_them_and_analyses_nothing(files, monkeypatch):
    for number in range(1, 5):
        night(files, {number: "a zebra"}, number)
    monkeypatch.setattr(word_index, "part_of", None)
    assert compact(files, PartTarget(), choose_index=same_index_and_words(files))[0] is not None
    assert len(published_words(files).ranking("zebra", 9)) == 4
    assert_ranks(files)


@pytest.mark.medium
def test_a_vacuum_keeps_those_of_versions_that_stay(files):
    for number in range(1, 4):
        night(files, {number: "a zebra"}, number)
    assert len(versions(files)) == 4
    vacuum(files, keep_days=0, keep_versions=1)
    assert versions(files) == {read_current(files).embeddings}
    assert_ranks(files)
    night(files, {9: "a quagga"}, 5)
    assert_ranks(files)


@pytest.mark.medium
@pytest.mark.parametrize("is_published", [True, False])
def test_a_purge_leaves_no_word_of_a_caption(files, is_published):
    night(files, {7: "xylophone"}, 1)
    night(files, {8: "zebra"}, 2, retired=[] if is_published else [7])
    assert holds(files, "xylophone"), "so that the test can fail"
    run_purge(files, ["0007.jpg"], index_choice(files, reuse=False))
    assert not holds(files, "xylophone")
    ensure_words(files, read_current(files).embeddings, IndexConfig(), may_update=False)
    assert not holds(files, "xylophone")
    assert_ranks(files)


@pytest.mark.medium
def test_killed_at_any_step_readers_have_the_words_of_what_they_read(tmp_path, monkeypatch):
    for number in count(0, 3):
        files = new_store(tmp_path / f"s{number}")
        night(files, {0: "sea", 1: "sun", 2: None})
        with dying(monkeypatch, number) as made, suppress(Killed):
            night(files, {1: "sea", 3: "sea sun"}, 1)
        if has_words(files, read_current(files).embeddings):
            texts, words = published_captions(files), published_words(files)
            assert [words.ranking(each, 9).tolist() for each in ("sea", "sun")] == [
                by_formula(texts, each) for each in ("sea", "sun")
            ]
        night(files, {1: "sea", 3: "sea sun"}, 2)
        assert_ranks(files)
        if len(made) < number:
            break


def test_an_older_store_gets_them_with_its_next_publication(tmp_path):
    files = new_store(tmp_path / "store")
    night(files, {0: "sea"}, config=IndexConfig(words="none"))
    assert versions(files) == set()
    night(files, {1: "sun"}, 1)
    assert_ranks(files)


@pytest.mark.parametrize(
    ("caption", "config"), [("sea", NO_FIRST_INDEX), ("sea", IndexConfig(words="none")), (None, IndexConfig())]
)
def test_none_are_made_where_none_are_asked_for_or_there_are_no_captions(tmp_path, caption, config):
    files = new_store(tmp_path / "store")
    night(files, {0: caption}, config=config)
    assert versions(files) == set()


def test_index_build_makes_damaged_ones_anew_and_leaves_whole_ones(files):
    folder = files.folder / "words" / f"{read_current(files).embeddings:06d}"
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    build_store_index(files)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    file = folder / "docs-000001.u32"
    content = file.read_bytes()
    file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    build_store_index(files)
    assert file.read_bytes() == content
    build_store_index(files, IndexConfig(words="english"))
    assert open_words(files, read_current(files).embeddings).manifest.analyser == "english"


def test_an_altered_list_is_not_taken_over_by_an_update(files):
    file = files.folder / "words" / f"{read_current(files).embeddings:06d}" / "docs-000001.u32"
    content = file.read_bytes()
    file.write_bytes(content[:4] * (len(content) // 4))
    night(files, {3: "a zebra"}, 1)
    assert_ranks(files)


def test_equal_captions_give_equal_files(files, tmp_path):
    other = new_store(tmp_path / "other")
    night(other, dict(enumerate(captions(60))))
    hashes = [open_words(each, read_current(each).embeddings).manifest.sha256 for each in (files, other)]
    assert hashes[0] == hashes[1]


@pytest.mark.medium
def test_a_store_in_a_bucket_is_searched_through_a_copy(bucket):
    files = new_store(f"{bucket}/store")
    night(files, dict(enumerate(captions(30))))
    night(files, {3: "a zebra"}, 1)
    assert_ranks(files)
    copies = [path.parent for path in cache_folder(COPIES_FOLDER).glob("*/docs-*.u32")]
    assert copies
    for folder in copies:
        (folder / "rows.u32").write_bytes(b"")
    assert_ranks(files)
    for file in cache_folder(COPIES_FOLDER).glob("*/docs-*.u32"):
        file.write_bytes(bytes(len(file.read_bytes())))
    build_store_index(files)
    with pytest.raises(RetrievalError, match="this copy was deleted"):
        assert_ranks(files)
    assert_ranks(files)
