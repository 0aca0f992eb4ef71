"""Vectors and caption words together, and the words' index that is kept on this machine."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from search_stores import QUERY, ids, picture, searchable, video

from embedder.retrieval import row_metadata, snapshot
from embedder.retrieval.hybrid import reciprocal_rank_fusion
from embedder.retrieval.queries import SearchOptions
from embedder.retrieval.store_api import open_store
from embedder.storage.user_cache import cache_folder
from embedder.store_index import keep_words
from embedder.store_index.index_versions import COPIES_FOLDER, drop_copies
from index.index_errors import RetrievalError

CAPTIONS = ["a red car", "the sea", None, "STRASSE im Regen", "a blue boat on the sea", "", "车"]


@pytest.fixture(autouse=True)
def _own_copies(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module", params=["words", "index", "exact"])
def address(request, tmp_path_factory):
    """Pictures ever farther from the query; the words of the last but two are unlike its vector."""
    pictures = [picture(f"{number}.png", 10 * number, caption=caption) for number, caption in enumerate(CAPTIONS)]
    text = picture("text", 0, image_embedding=None, text_embedding=[1.0, 0.0], modality="text", caption="the sea, sea")
    folder = tmp_path_factory.mktemp("hybrid") / "s"
    rows = [text, *pictures, *video("v.mp4", 100, 110, caption="waves")]
    words = "unicode" if request.param == "words" else "none"
    return searchable(folder, *rows, index=request.param != "exact", words=words).files.address


@pytest.fixture
def store(address):
    return open_store(address)


@pytest.fixture
def cached(store):
    """A store that publishes no word index, so that readers keep one."""
    if keep_words.has_words(store.files, store.current.embeddings):
        pytest.skip("it has a word index of its own")
    return store


def hybrid(store, text: str, k: int = 10, **options):
    return store.searcher.search_batch(QUERY[None], SearchOptions(k=k, hybrid=True, **options), texts=[text])[0]


def test_ranks_are_fused_as_the_paper_has_it():
    rows, sums = reciprocal_rank_fusion([np.array([7, 3, 5]), np.array([5, 9])])
    assert rows.tolist() == [5, 7, 3, 9]
    assert sums.tolist() == pytest.approx([1 / 63 + 1 / 61, 1 / 61, 1 / 62, 1 / 62])
    assert reciprocal_rank_fusion([np.empty(0, np.int64)])[0].tolist() == []


def test_words_lift_what_vectors_rank_low(store):
    hits = hybrid(store, "Sea boat", k=3)
    assert ids(hits) == ["1.png", "4.png", "0.png"], "ranks 2 and 2, 5 and 1, 1 and none"
    assert [hit.words_rank for hit in hits] == [2, 1, None]
    assert [hit.rank_score for hit in hits] == pytest.approx([1 / 62 + 1 / 62, 1 / 65 + 1 / 61, 1 / 61])
    assert hits[1].score == pytest.approx(np.cos(np.radians(40)), abs=1e-6), "the score stays a cosine"
    plain = store.search(QUERY, k=3)
    assert ids(plain) == ["0.png", "1.png", "2.png"]
    assert plain[0].rank_score is None


def test_texts_without_a_picture_are_no_hits(store):
    assert "text" not in ids(hybrid(store, "the sea, sea"))


@pytest.mark.parametrize("text", ["zebra", "!?", "   ", "日本"])
def test_words_that_occur_nowhere_leave_the_vectors_order(store, text):
    assert ids(hybrid(store, text)) == ids(store.search(QUERY))


@pytest.mark.parametrize(
    ("text", "found"), [("straße", "3.png"), ("REGEN", "3.png"), ("\uff33\uff25\uff21 BOAT", "4.png"), ("车", "6.png")]
)
def test_case_and_form_of_characters_make_no_difference(store, text, found):
    (first,) = [hit.item_id for hit in hybrid(store, text) if hit.words_rank == 1]
    assert first == found


def test_a_condition_holds_for_words_too(store):
    hits = hybrid(store, "sea", where="item_id <> '1.png' AND item_id > '2'")
    assert ids(hits)[0] == "4.png"
    assert "1.png" not in ids(hits)
    assert hits[0].words_rank == 1, "what the condition leaves out takes no rank"


def test_a_least_score_holds_for_words_too(store):
    assert ids(hybrid(store, "waves sea", min_score=0.9)) == ["1.png", "0.png", "2.png"]


def test_segments_of_a_video_are_one_hit(store):
    hits = hybrid(store, "waves")
    assert ids(hits).count("v.mp4") == 1
    (hit,) = [hit for hit in hits if hit.item_id == "v.mp4"]
    assert (hit.segment, hit.words_rank, [each.start_s for each in hit.segments]) == (0, 1, [5.0])


def test_near_duplicates_are_folded_in_the_order_of_the_ranks(store):
    hits = hybrid(store, "sea boat", fold=float(np.cos(np.radians(11))), k=2)
    assert ids(hits)[0] == "1.png"
    assert {each.item_id for each in hits[0].duplicates} == {"0.png", "2.png"}


def test_a_store_without_captions_is_searched_by_vectors(tmp_path):
    store = searchable(tmp_path / "s", picture("a", 0), picture("b", 10))
    assert ids(hybrid(store, "anything")) == ["a", "b"]


def kept() -> list:
    return sorted(cache_folder(COPIES_FOLDER).glob("words-*"))


def test_the_next_process_builds_nothing(cached, monkeypatch):
    expected = hybrid(cached, "sea boat")
    assert len(kept()) == 1
    monkeypatch.setattr("embedder.retrieval.hybrid.build_words", None)
    assert hybrid(open_store(cached.files.address), "sea boat") == expected


@pytest.mark.parametrize("damage", ["cut", "altered", "missing", "no manifest"])
def test_what_was_damaged_is_built_again(cached, damage, monkeypatch):
    expected = hybrid(cached, "sea boat")
    (folder,) = kept()
    file = folder / ("manifest.json" if damage == "no manifest" else "rows.u32")
    content, rows = file.read_bytes(), (folder / "rows.u32").read_bytes()
    if damage in ("missing", "no manifest"):
        file.unlink()
    else:
        file.write_bytes(content[:-8] if damage == "cut" else content[:-1] + bytes([content[-1] ^ 1]))
    assert hybrid(open_store(cached.files.address), "sea boat") == expected
    assert (kept()[0] / "rows.u32").read_bytes() == (content if file.name == "rows.u32" else rows)


def test_a_copy_with_an_altered_list_is_told_and_made_anew(cached):
    expected = hybrid(cached, "sea boat")
    file = kept()[0] / "docs-000001.u32"
    file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))
    with pytest.raises(RetrievalError, match="this copy was deleted, so the next search makes another$"):
        hybrid(open_store(cached.files.address), "sea boat")
    assert hybrid(open_store(cached.files.address), "sea boat") == expected


def test_another_publication_has_an_index_of_its_own(tmp_path):
    for number in range(2):
        store = searchable(
            tmp_path / f"s{number}", picture("a", 0, caption=f"word{number}"), picture("b", 10), words="none"
        )
        assert hybrid(store, f"word{number}")[0].words_rank == 1
    assert len(kept()) == 2


def test_purging_drops_it_and_what_a_killed_build_left(cached):
    hybrid(cached, "sea")
    leftover = cache_folder(COPIES_FOLDER) / ".building-words-0"
    leftover.mkdir()
    drop_copies()
    assert kept() == [] and not leftover.exists()
    assert hybrid(cached, "sea")[0].words_rank == 1, "what is open stays so"


def test_a_searcher_that_takes_over_is_ready_for_the_same_queries(store, monkeypatch):
    hybrid(store, "sea", where="segment = 0")
    fresh = open_store(store.files.address)
    fresh.prepare(store)
    for name in ("open_words", "RowMetadata", "ExactIndex", "open_version", "ItemRows"):
        monkeypatch.setattr(snapshot, name, None)
    monkeypatch.setattr(row_metadata, "RowFilter", None)
    assert hybrid(fresh, "sea", where="segment = 0") == hybrid(store, "sea", where="segment = 0")


def test_nothing_can_be_kept_and_search_goes_on(cached, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert hybrid(cached, "sea boat")[0].item_id == "1.png"


def test_several_build_at_once(cached):
    start = threading.Barrier(4)

    def ask(_):
        fresh = open_store(cached.files.address)
        start.wait()
        return ids(hybrid(fresh, "sea boat"))

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(ask, range(4)))
    assert found == [ids(hybrid(cached, "sea boat"))] * 4
    assert len(kept()) == 1
    assert [path for path in cache_folder(COPIES_FOLDER).iterdir() if path.name.startswith(".")] == []


def test_a_caption_that_is_the_query_comes_first(tmp_path):
    """By vectors the goldfish is last of many, and the snake first."""
    names = ["snake", *(f"thing {n}" for n in range(120)), "a goldfish in a bowl", "goldfish"]
    rows = [picture(f"{n:03d}.png", 0.5 * n, caption=name) for n, name in enumerate(names)]
    store = searchable(tmp_path / "s", *rows)
    hits = hybrid(store, "Goldfish!", k=3)
    assert [hit.caption for hit in hits] == ["goldfish", "snake", "a goldfish in a bowl"]
    assert hits[0].rank_score == pytest.approx(2 / 61)
    assert [(hit.words_rank, hit.vector_rank) for hit in hits] == [(1, None), (None, 1), (2, None)]


def test_of_two_equal_sums_the_one_with_the_words_comes_first(tmp_path):
    names = ["snake", *(f"thing {n}" for n in range(120)), "an old goldfish"]
    store = searchable(
        tmp_path / "s", *(picture(f"{n:03d}.png", 0.5 * n, caption=name) for n, name in enumerate(names))
    )
    hits = hybrid(store, "goldfish", k=2)
    assert [hit.caption for hit in hits] == ["an old goldfish", "snake"]
    assert hits[0].rank_score == hits[1].rank_score
