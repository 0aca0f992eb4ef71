"""From vectors to rows of the table: found once, then looked up; and the same answers with an index as without."""

import numpy as np
import pyarrow as pa
import pytest
from search_stores import QUERY, ids, picture, searchable, video

from embedder.retrieval.flat_index import ExactIndex, largest
from embedder.retrieval.model_columns import match_keys
from embedder.retrieval.queries import SearchOptions
from embedder.retrieval.ranking import ItemRows
from embedder.store.tables.tables import RecordTable
from index.index_errors import RetrievalError


def keys(*pairs) -> pa.Table:
    items, segments = zip(*pairs, strict=True) if pairs else ((), ())
    return pa.table({"item_id": pa.array(items, pa.string()), "segment": pa.array(segments, pa.int32())})


@pytest.fixture(params=[None, 0], ids=["in memory", "in parts"])
def in_parts(monkeypatch, request):
    """Few keys are matched in memory, more part by part; which, follows from their size."""
    if request.param is not None:
        monkeypatch.setattr("embedder.storage.hashed_rows.MEMORY_BYTES", request.param)


@pytest.mark.usefixtures("in_parts")
def test_each_key_finds_its_row_in_any_order():
    known = keys(("a", 0), ("b", 0), ("b", 1), ("b", 7), ("c", 0), ("ü", 0))
    assert match_keys(known, known).tolist() == [0, 1, 2, 3, 4, 5]
    wanted = keys(("ü", 0), ("b", 7), ("z", 0), ("b", 2), ("b", 0), ("a", 0), ("a", 0), ("", 0))
    assert match_keys(wanted, known).tolist() == [5, 3, -1, -1, 1, 0, 0, -1]
    assert match_keys(keys(), known).tolist() == []
    assert match_keys(wanted, keys()).tolist() == [-1] * 8


@pytest.mark.usefixtures("in_parts")
def test_keys_in_many_chunks_find_their_rows():
    known = pa.concat_tables([keys((f"{n:03d}", s)) for n in range(40) for s in range(2)])
    order = np.random.default_rng(0).permutation(80)
    assert match_keys(known.take(pa.array(order)), known).tolist() == order.tolist()


def test_a_removed_row_needs_no_description_and_a_live_one_does(tmp_path):
    store = searchable(tmp_path / "s", picture("a", 0), picture("b", 10), index=False)
    metadata = store.searcher.snapshot.metadata
    found = metadata.rows_of(keys(("b", 0), ("gone", 0), ("a", 0)), np.array([True, False, True]))
    assert [metadata.rows["item_id"][row].as_py() for row in found[[0, 2]]] == ["b", "a"]
    assert found[1] == -1
    with pytest.raises(RetrievalError, match="'gone', which the embeddings published with it lack; build the index"):
        metadata.rows_of(keys(("b", 0), ("gone", 0)), np.array([True, True]))


def test_videos_are_known_by_their_segments():
    items = ItemRows(keys(("p", 0), ("v", 1), ("w", 0), ("v", 0), ("q", 0), ("w", 3), ("v", 2)))
    assert items.has_groups
    assert sorted(items.others(3).tolist()) == [1, 6]
    assert items.others(2).tolist() == [5]
    assert items.others(0).tolist() == []
    assert items.first_of_each(np.array([6, 4, 3, 0, 5, 1, 2])).tolist() == [0, 1, 3, 4]
    pictures = ItemRows(keys(("p", 0), ("q", 0)))
    assert not pictures.has_groups
    assert pictures.first_of_each(np.array([1, 0])).tolist() == [0, 1]
    assert pictures.others(0).tolist() == []


def test_later_queries_read_nothing(tmp_path, monkeypatch):
    store = searchable(tmp_path / "s", *(picture(f"{n}.png", n, caption="sea") for n in range(9)), price=list(range(9)))
    store.prepare()
    monkeypatch.setattr(RecordTable, "read", None)
    monkeypatch.setattr(type(store.files), "open", None)
    assert ids(store.search(QUERY, k=2)) == ["0.png", "1.png"]
    assert store.search(QUERY, k=1, where="price = 5", fold=0.9)[0].carryover == {"price": 5}


@pytest.mark.parametrize("memory_bytes", [0, 1 << 20], ids=["mapped", "in memory"])
def test_columns_are_read_a_piece_at_a_time_and_found_again(tmp_path, monkeypatch, memory_bytes):
    store = searchable(tmp_path / "s", *(picture(f"{n}.png", n, caption=f"sea {n}") for n in range(9)))
    monkeypatch.setattr("embedder.store.tables.tables.ROWS_PER_PIECE", 1)
    monkeypatch.setattr("embedder.storage.spill_file.MEMORY_BYTES", memory_bytes)
    read, sizes = RecordTable.read, []

    def seen(table, *arguments):
        found = read(table, *arguments)
        sizes.append(found.num_rows)
        return found

    monkeypatch.setattr(RecordTable, "read", seen)
    assert store.searcher.snapshot.metadata.rows.num_rows == 9
    assert sizes == [4, 5], "each part file by itself"
    assert [hit.caption for hit in store.search(QUERY, k=2)] == ["sea 0", "sea 1"]


def test_the_largest_come_first_and_equal_ones_in_their_order():
    values = np.array([1, 3, 2, 3, 0, 2], np.float32)
    assert [largest(values, k).tolist() for k in (1, 2, 4, 9)] == [[1], [1, 3], [1, 3, 2, 5], [1, 3, 2, 5, 0, 4]]
    assert largest(values[:0], 3).tolist() == []


def test_the_exact_search_of_a_few_rows_is_that_of_all_without_the_rest():
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((200, 8)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    exact = ExactIndex(pa.table({"item_id": [str(n) for n in range(200)], "segment": [0] * 200}), vectors)
    among = rng.random(200) < 0.2
    found = exact.search(vectors[:70], 5, among=among)
    scores = np.where(among, vectors[:70] @ vectors.T, -np.inf)
    assert (found.rows == np.argsort(-scores, axis=1, kind="stable")[:, :5]).all()
    assert found.rows.shape == (70, 5)
    assert exact.search(vectors[:2], 500, among=among).rows.shape == (2, among.sum())
    assert exact.search(vectors[:2], 500, among=np.zeros(200, bool)).rows.shape == (2, 0)


OPTIONS = [
    {},
    {"group": False},
    {"k": 500},
    {"where": "segment = 0 OR start_s > 8"},
    {"where": "caption LIKE '%sea%'", "min_score": 0.1},
    {"fold": 0.8},
    {"fold": 0.7, "group": False, "where": "item_id > '05'"},
    {"hybrid": True},
    {"hybrid": True, "fold": 0.8, "where": "segment < 3", "min_score": -0.2},
]


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    """One set of rows in two stores, with an index and without; and queries."""
    rng = np.random.default_rng(1)

    def unit() -> list[float]:
        vector = rng.standard_normal(6)
        return (vector / np.linalg.norm(vector)).astype(np.float32).tolist()

    words = ["sea", "sun", "a red boat", "sand", None]
    pictures = [picture(f"{n:02d}", 0, caption=words[n % 5]) for n in range(60)]
    clips = [row for n in range(60, 70) for row in video(f"{n:02d}", *range(5), caption=words[n % 4])]
    rows = [row | {"image_embedding": unit()} for row in (*pictures, *clips)]
    folder = tmp_path_factory.mktemp("twins")
    stores = [searchable(folder / name, *rows, index=name == "index") for name in ("index", "exact")]
    return stores, np.array([unit() for _ in range(4)], np.float32)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_an_index_and_none_give_the_same(twins, options):
    stores, queries = twins
    texts = ["sea", "red sun", "boat boat", "nothing"]
    through_index, exact = (
        store.searcher.search_batch(queries, SearchOptions(**options), texts=texts) for store in stores
    )
    for ours, theirs in zip(through_index, exact, strict=True):
        assert len(ours) > 3
        for hit, other in zip(ours, theirs, strict=True):
            assert (hit.item_id, hit.segment, hit.words_rank) == (other.item_id, other.segment, other.words_rank)
            assert hit.score == pytest.approx(other.score, abs=1e-6)
            assert [each.start_s for each in hit.segments] == [each.start_s for each in other.segments]
            assert ids(hit.duplicates) == ids(other.duplicates)
