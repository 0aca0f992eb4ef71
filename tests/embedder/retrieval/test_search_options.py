"""Batches, videos as one hit, near-duplicates, a least score: the same through an index and without one."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from search_stores import QUERY, ids, picture, searchable, towards, video
from store_samples import reject

from embedder.compat.locked_property import locked_cached_property
from embedder.errors import ArgumentTypeError, ConfigError
from embedder.retrieval.ranking import Ranking, best_segments, fold
from index.index_errors import RetrievalError


def cosine(degrees: float) -> float:
    return math.cos(math.radians(degrees))


@pytest.fixture(scope="module", params=[True, False], ids=["index", "exact"])
def store(request, tmp_path_factory):
    """Two long videos whose segments are nearer to the query than all pictures, and a text that has no picture."""
    return searchable(
        tmp_path_factory.mktemp("options") / "s",
        *video("a.mp4", *(40 - number for number in range(30))),
        *video("b.mp4", *(5 + number for number in range(30))),
        *(picture(f"{number}.png", 50 + number) for number in range(5)),
        picture("text", 0, image_embedding=None, text_embedding=[1.0, 0.0], modality="text"),
        index=request.param,
    )


def test_k_counts_videos_and_pictures_and_not_segments(store):
    hits = store.search(QUERY, k=4)
    assert ids(hits) == ["b.mp4", "a.mp4", "0.png", "1.png"]
    assert [hit.segment for hit in hits] == [0, 29, 0, 0]
    assert [hit.score for hit in hits] == pytest.approx([cosine(5), cosine(11), cosine(50), cosine(51)], abs=1e-6)


def test_a_video_tells_its_other_times_best_first(store):
    video_hit, picture_hit = (store.search(QUERY, k=3)[place] for place in (1, 2))
    assert [segment.start_s for segment in video_hit.segments] == [5.0 * number for number in range(28, -1, -1)]
    assert video_hit.segments[0] == pytest.approx((140.0, 145.0, cosine(12)), abs=1e-6)
    assert picture_hit.segments == []


def test_a_segment_that_the_index_missed_stands_for_its_video():
    hits = Ranking(np.array([4, 7, 9]), np.array([0.9, 0.8, 0.7], np.float32), is_whole=False)
    none = (np.empty(0, np.int64), np.empty(0, np.float32))
    others = [none, (np.array([5, 6, 8]), np.array([0.95, 0.85, 0.1], np.float32)), (np.array([3]), np.float32([0.7]))]
    found, segments = best_segments(hits, others)
    assert found.rows.tolist() == [4, 5, 9]
    assert found.scores.tolist() == pytest.approx([0.9, 0.95, 0.7])
    assert [rows.tolist() for rows, _ in segments] == [[], [6, 7, 8], [3]]
    assert segments[1][1].tolist() == pytest.approx([0.85, 0.8, 0.1])


def test_other_times_obey_the_condition_and_the_least_score(store):
    (hit,) = store.search(QUERY, k=1, where="item_id = 'b.mp4' AND start_s >= 10", min_score=cosine(9.5))
    assert (hit.segment, [segment.start_s for segment in hit.segments]) == (2, [15.0, 20.0])


def test_without_grouping_each_segment_is_a_hit(store):
    hits = store.search(QUERY, k=6, group=False)
    assert [(hit.item_id, hit.segment) for hit in hits] == [("b.mp4", number) for number in range(6)]
    assert all(hit.segments == [] for hit in hits)


def test_more_than_there_is_gives_all(store):
    assert len(store.search(QUERY, k=1000)) == 7
    assert len(store.search(QUERY, k=1000, group=False)) == 65


def test_a_batch_gives_each_query_what_it_gets_alone(store):
    queries = np.stack([towards(degrees) for degrees in (0, 20.2, 53.3, 90)])
    for options in ({}, {"group": False}, {"fold": 0.9999}, {"min_score": 0.99}, {"where": "start_s IS NULL"}):
        answers = store.search(queries, k=3, **options)
        assert len(answers) == 4
        for query, hits in zip(queries, answers, strict=True):
            alone = store.search(query, k=3, **options)
            assert [(hit.item_id, hit.segment, ids(hit.duplicates), len(hit.segments)) for hit in hits] == [
                (hit.item_id, hit.segment, ids(hit.duplicates), len(hit.segments)) for hit in alone
            ]
            assert [hit.score for hit in hits] == pytest.approx([hit.score for hit in alone], abs=1e-6)


def test_a_batch_is_one_search_of_the_index(tmp_path, monkeypatch):
    store = searchable(tmp_path / "s", *(picture(f"{number}.png", number) for number in range(9)), index=False)
    calls = []
    vectors = store.searcher.snapshot.vectors
    search = vectors.search
    monkeypatch.setattr(
        vectors, "search", lambda *args, **options: calls.append(len(args[0])) or search(*args, **options)
    )
    store.search(np.stack([QUERY] * 5), k=3)
    assert calls == [5]
    assert store.search(np.empty((0, 2), np.float32)) == []


def test_a_least_score_is_a_cosine(store):
    hits = store.search(QUERY, k=10, min_score=cosine(51.5))
    assert ids(hits) == ["b.mp4", "a.mp4", "0.png", "1.png"]
    nothing = store.search(QUERY, k=10, min_score=0.9999)
    assert nothing == []
    assert "the best is 0.996" in nothing.note


@pytest.mark.parametrize("index", [True, False], ids=["index", "exact"])
def test_near_duplicates_are_folded_under_the_better_hit(index, tmp_path):
    degrees = [10, 10.5, 11, 40, 40.2, 60, 10, 80]
    store = searchable(tmp_path / "s", *(picture(f"{n}.png", each) for n, each in enumerate(degrees)), index=index)
    hits = store.search(QUERY, k=3, fold=cosine(0.7))
    assert ids(hits) == ["0.png", "2.png", "3.png"], "2.png is near to 1.png, which is folded, and not to 0.png"
    assert [[each.item_id for each in hit.duplicates] for hit in hits] == [["6.png", "1.png"], [], ["4.png"]]
    assert hits[0].duplicates[1].score == pytest.approx(cosine(10.5), abs=1e-6)
    assert ids(store.search(QUERY, k=3)) == ["0.png", "6.png", "1.png"]


def test_equal_vectors_are_folded_at_a_cosine_of_1(tmp_path):
    rng = np.random.default_rng(0)
    vector = rng.standard_normal(24)
    vector /= np.linalg.norm(vector)
    rows = [picture(f"{n:02d}.png", 0, image_embedding=vector.astype(np.float32).tolist()) for n in range(50)]
    hits = searchable(tmp_path / "s", *rows).search(vector.astype(np.float32), k=5, fold=1.0)
    assert ids(hits) == ["00.png"]
    assert len(hits[0].duplicates) == 49


def test_folding_keeps_the_first_of_each_kind():
    vectors = np.stack([towards(degrees) for degrees in (0, 90, 1, 91, 180, 2)])
    kept, duplicates = fold(vectors, cosine(3), 2)
    assert kept.tolist() == [0, 1]
    assert [each.tolist() for each in duplicates] == [[2, 5], [3]]
    assert fold(np.empty((0, 2), np.float32), 0.9, 3)[0].tolist() == []


MISTAKES = [
    (lambda store: store.search(QUERY, k=0), RetrievalError, "ask for 1 result or more"),
    (lambda store: store.search(QUERY, fold=1.5), ConfigError, "fold is 1.5"),
    (lambda store: store.search(QUERY, fold=float("nan")), ConfigError, "fold is nan"),
    (lambda store: store.search(QUERY, min_score=2), ConfigError, "minimum score is 2"),
    (lambda store: store.search(), ConfigError, "there is no query"),
    (lambda store: store.search(QUERY, image="x.png"), ConfigError, "goes together with a text"),
    (lambda store: store.search(QUERY, hybrid=True), ConfigError, "search with a text"),
    (lambda store: store.search(np.ones(2, np.float32)), RetrievalError, "divide vectors by their L2 norm"),
    (lambda store: store.search(np.ones(3, np.float32) / 3**0.5), RetrievalError, "2 are needed"),
    (lambda store: store.search(np.array([np.nan, 1], np.float32)), RetrievalError, "finite"),
]


@pytest.mark.parametrize("number", range(len(MISTAKES)))
def test_a_mistake_is_told(number, store):
    ask, kind, message = MISTAKES[number]
    with pytest.raises(kind) as caught:
        ask(store)
    assert message in str(caught.value)


def test_a_store_without_pictures_says_so(tmp_path):
    text = picture("text", 0, image_embedding=None, text_embedding=[1.0, 0.0], modality="text")
    hits = searchable(tmp_path / "s", text, index=False).search(QUERY, where="true", fold=0.9)
    assert (hits, hits.note) == ([], "the store holds no image or video")
    nothing = searchable(tmp_path / "r", reject("broken"), index=False).search(QUERY, where="caption IS NULL")
    assert (nothing, nothing.note) == ([], "the store holds no image or video")


def test_to_arrow_refuses_what_is_no_column_and_no_list(tmp_path):
    store = searchable(tmp_path / "s", picture("a.png", 0), price=[1.5])
    assert store.to_arrow(("price", "item_id")).to_pylist() == [{"price": 1.5, "item_id": "a.png"}]
    empty = searchable(tmp_path / "empty", index=False).to_arrow(["item_id", "caption"])
    assert (empty.num_rows, empty.column_names) == (0, ["item_id", "caption"])
    with pytest.raises(ConfigError, match=r"^to_arrow: there is no column 'Price'; columns are item_id, .*, price$"):
        store.to_arrow(["item_id", "Price"])
    for columns in ("price", 3):
        with pytest.raises(ArgumentTypeError, match=r"^to_arrow: columns: found (str|int); give a list of names"):
            store.to_arrow(columns)


def test_carried_columns_come_with_each_hit(tmp_path):
    rows = [picture(f"{number}.png", 10 * number) for number in range(4)]
    store = searchable(tmp_path / "s", *rows, price=[1.5, None, 3.5, 4.5], old_embedding=[0, 1, 2, 3])
    hits = store.search(QUERY, k=2, where="old_embedding < 9")
    assert [hit.carryover for hit in hits] == [
        {"price": 1.5, "old_embedding": 0},
        {"price": None, "old_embedding": 1},
    ]


def test_a_carried_column_may_have_any_name(tmp_path):
    rows = [picture(f"{number}.png", 10 * number) for number in range(4)]
    names = {"__row_number": [9, 9, 9, 9], "Price in EUR": [1, 2, 3, 4], "embeddings": ["a", "b", "c", "d"]}
    store = searchable(tmp_path / "s", *rows, **names)
    assert ids(store.search(QUERY, where="\"Price in EUR\" >= 3 AND embeddings <> 'd'")) == ["2.png"]


def test_many_threads_make_a_thing_once():
    made, start = [], threading.Barrier(8)

    class Owner:
        @locked_cached_property
        def thing(self):
            made.append(self)
            return object()

    owner = Owner()
    with ThreadPoolExecutor(8) as pool:
        seen = list(pool.map(lambda _: (start.wait(), owner.thing)[1], range(8)))
    assert made == [owner]
    assert len(set(map(id, seen))) == 1
    assert Owner().thing is not owner.thing


def test_many_threads_search_a_fresh_store(tmp_path):
    pictures = [picture(f"{number}.png", number) for number in range(20)]
    store = searchable(tmp_path / "s", *pictures, price=list(range(20)))
    start = threading.Barrier(6)

    def ask(number):
        start.wait()
        return ids(store.search(towards(number), k=1, where=f"price >= {number}"))

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, range(6))) == [[f"{number}.png"] for number in range(6)]
