"""Words that a further model read in pictures: ranked next to captions, kept, updated and purged as captions' are."""

import pyarrow as pa
import pytest
from model_stores import add_model, label_row
from search_stores import QUERY, ids, picture, searchable

from embedder.config_toml.sections import IndexConfig
from embedder.plugins.maintain.purge.purge import purge
from embedder.plugins.maintain.store_check.check import check_store
from embedder.retrieval.queries import SearchOptions
from embedder.retrieval.store_api import keep_row_files, open_store
from embedder.store.layout import read_current
from embedder.store.lock import write_lock
from embedder.store.tables.models import model_files
from embedder.store_index.keep_index import ensure_index, index_choice
from embedder.store_index.keep_words import has_words, open_words

SIGNS = ["Café open", None, "invoice 2024 total", "total of the invoice: 2024", "INVOICE\n2024, paid"]


@pytest.fixture(autouse=True)
def _own_copies(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(params=["kept", "built by the reader"])
def store(request, tmp_path):
    """Pictures ever farther from the query; a model has read the words in all but the first, in another order."""
    rows = [picture(f"{number}.png", 10 * number, caption="a shop" if number == 1 else None) for number in range(6)]
    files = searchable(tmp_path / "s", *rows).files
    add_words(files, SIGNS)
    if request.param == "kept":
        view = model_files(files, "ocr")
        assert ensure_index(view, read_current(view).embeddings, None) is None
        assert has_words(view, read_current(view).embeddings)
    return open_store(files.address)


def add_words(files, signs, **changes):
    rows = [label_row(f"{5 - number}.png") for number in range(len(signs))]
    add_model(files, "ocr", *rows, has_vectors=False, words=pa.array(signs, pa.string()), **changes)


def hybrid(store, text, **options):
    return store.searcher.search_batch(QUERY[None], SearchOptions(k=10, hybrid=True, **options), texts=[text])[0]


def test_a_phrase_in_a_picture_is_before_the_same_words_apart(store):
    hits = hybrid(store, "invoice 2024")
    assert set(ids(hits)[:2]) == {"3.png", "1.png"}, "one after the other, over a line's end and signs"
    assert [hit.words_rank is not None for hit in hits] == [True] * 3 + [False] * 3
    assert ids(hits)[2] == "2.png"


def test_words_of_captions_and_of_pictures_are_one_ranking(store):
    hits = {hit.item_id: hit.words_rank for hit in hybrid(store, "shop café")}
    assert {hits["1.png"], hits["5.png"]} == {1, 2}


def test_conditions_hold_for_words_in_pictures(store):
    assert ids(hybrid(store, "invoice 2024", where="item_id <> '3.png' and ocr.words is not null"))[0] == "1.png"


def test_words_are_updated_with_the_next_publication(store):
    view, files = model_files(store.files, "ocr"), store.files
    before = read_current(view).embeddings
    add_words(files, [*SIGNS[:4], "nothing left"], retired=True)
    after = read_current(view).embeddings
    ensure_index(view, after, None)
    assert open_words(view, after).manifest.num_captions == 4
    assert ids(hybrid(open_store(files.address), "nothing left"))[0] == "1.png"
    assert [finding for finding in check_store(files).findings if "words" in finding.place] == []
    assert before != after


def test_purged_words_are_in_no_index(store):
    files, view = store.files, model_files(store.files, "ocr")
    with write_lock(files):
        purge(files, ["3.png"], index_choice(files, reuse=False))
    assert [info.path for info in files.list("models/ocr/words")] == []
    ensure_index(view, read_current(view).embeddings, None, may_update=False)
    assert open_words(view, read_current(view).embeddings).manifest.num_captions == 3
    assert ids(hybrid(open_store(files.address), "invoice 2024"))[0] == "1.png"


def test_without_a_words_index_none_is_made(store):
    view = model_files(store.files, "ocr")
    version = read_current(view).embeddings
    if has_words(view, version):
        pytest.skip("it is there")
    ensure_index(view, version, None, IndexConfig(words="none"))
    assert not has_words(view, version)


@pytest.mark.parametrize("is_noted", [True, False])
def test_row_files_say_whose_words_they_are_and_no_table_is_read_for_that(store, monkeypatch, is_noted):
    monkeypatch.setattr("embedder.retrieval.row_files.MIN_ROWS", 1)
    texts = ["invoice 2024", "shop café", "total"]
    expected = [[(hit.item_id, hit.words_rank) for hit in hybrid(store, text)] for text in texts]
    with write_lock(store.files), monkeypatch.context() as patched:
        if not is_noted:  # as releases before wrote them
            patched.setattr("embedder.retrieval.model_columns.ModelColumns.word_tables", lambda _: ())
        keep_row_files(store.files)
    opened = open_store(store.files.address)
    assert opened.searcher.snapshot.mapped.of_model("ocr", 5) is not None or not is_noted
    with monkeypatch.context() as patched:
        if is_noted:
            patched.setattr("embedder.retrieval.model_columns.ModelColumns.rows_of", None)
        assert [[(hit.item_id, hit.words_rank) for hit in hybrid(opened, text)] for text in texts] == expected
