"""Results of a search: the exact answer where the index is exact, k results whenever k exist, and clear refusals."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import faiss
import numpy as np
import pytest
from index_samples import DIM, Build, make_ids, make_vectors

from index import faiss_build, faiss_search
from index.constraints import Constraints
from index.index_errors import RetrievalError
from index.search import open_index

KINDS = ("flat", "hnsw", "ivf")


def test_flat_search_gives_the_cosines_and_rows_of_brute_force(build: Build) -> None:
    vectors, queries = make_vectors(2000), make_vectors(40, seed=1)
    out, _ = build(vectors)
    hits = open_index(out).search(queries, 7)
    cosines = queries.astype(np.float64) @ vectors.T.astype(np.float64)
    exact = np.argsort(-cosines, axis=1)[:, :7]
    assert (hits.rows == exact).all()
    assert hits.rows.dtype == np.int64
    assert hits.scores.dtype == np.float32
    np.testing.assert_allclose(hits.scores, np.take_along_axis(cosines, exact, axis=1), atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_names_its_item_and_segment(build: Build, kind: str) -> None:
    vectors = make_vectors(300)
    out, _ = build(vectors, kind=kind)
    index = open_index(out)
    rows = index.search(vectors[[41, 8]], 1).rows[:, 0]
    assert index.ids.take(rows).to_pylist() == [
        {"item_id": "clips/00020.mp4", "segment": 1, "run_id": "run-1"},
        {"item_id": "clips/00004.mp4", "segment": 0, "run_id": "run-1"},
    ]


def test_a_search_for_one_finds_what_a_search_for_ten_finds_first(build: Build) -> None:
    """A re-ranked design has its recall from ten times as many rows as are re-ranked for one."""
    out, manifest = build(make_vectors(2000, 64), kind="IVF8,RaBitQ")
    assert manifest.recall_at_10 >= 0.9
    index, queries = open_index(out), make_vectors(100, 64, seed=1)
    ten = index.search(queries, 10)
    for k in (1, 3):
        few = index.search(queries, k)
        assert (few.rows == ten.rows[:, :k]).all() and (few.scores == ten.scores[:, :k]).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [300, 301, 100_000])
def test_k_beyond_the_table_gives_every_row_once(build: Build, kind: str, k: int) -> None:
    out, _ = build(kind=kind)
    hits = open_index(out).search(make_vectors(4, seed=2), k)
    assert hits.scores.shape == hits.rows.shape == (4, 300)
    assert (np.sort(hits.rows, axis=1) == np.arange(300)).all()
    assert (np.diff(hits.scores, axis=1) <= 0).all()


def test_k_results_come_back_where_the_probed_lists_hold_fewer(build: Build) -> None:
    """30 lists of about 66 vectors, one of them read: 150 neighbours are more than it holds."""
    vectors, queries = make_vectors(2000), make_vectors(6, seed=2)
    out, _ = build(vectors, kind="ivf", queries=queries, constraints=Constraints(recall=1e-9))
    index = open_index(out)
    assert index.manifest.parameters["nprobe"] == 1
    hits = index.search(queries, 150)
    exact = np.argsort(-(queries @ vectors.T), axis=1)[:, :150]
    assert [set(row) for row in hits.rows.tolist()] == [set(row) for row in exact.tolist()]


@pytest.mark.parametrize("kind", KINDS)
def test_equal_vectors_come_back_in_the_order_of_their_rows(build: Build, kind: str) -> None:
    vectors = np.vstack([np.repeat(make_vectors(1), 12, axis=0), make_vectors(500, seed=3)])
    out, _ = build(vectors, kind=kind)
    assert open_index(out).search(vectors[:1], 12).rows.tolist() == [list(range(12))]


@pytest.mark.parametrize("kind", KINDS)
def test_threads_and_repetition_change_nothing(build: Build, kind: str) -> None:
    out, _ = build(make_vectors(3000), kind=kind)
    queries = make_vectors(64, seed=1)
    index = open_index(out)
    first = index.search(queries, 10, num_threads=1)
    for again in (index.search(queries, 10, num_threads=2), open_index(out).search(queries, 10)):
        assert (again.rows == first.rows).all()
        assert (again.scores == first.scores).all()


def test_searches_from_several_threads_do_not_mix(build: Build) -> None:
    vectors = make_vectors(3000)
    out, _ = build(vectors, kind="hnsw")
    index = open_index(out)

    def find_itself(row: int) -> int:
        return int(index.search(vectors[row : row + 1], 1, num_threads=1).rows[0, 0])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(find_itself, range(400))) == list(range(400))


def test_a_search_leaves_the_thread_count_of_faiss_as_it_was(build: Build) -> None:
    out, _ = build()
    before = faiss.omp_get_max_threads()
    open_index(out).search(make_vectors(1), 1, num_threads=before + 3)
    assert faiss.omp_get_max_threads() == before


def test_a_short_search_starts_no_threads_and_a_long_one_does(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    out, _ = build(make_vectors(3000), kind="ivf")
    index = open_index(out)
    index.manifest = index.manifest.model_copy(update={"latency_ms": 0.1})
    search, seen = faiss_search.search, []

    def noting(*arguments: Any) -> Any:
        seen.append(faiss.omp_get_max_threads())
        return search(*arguments)

    monkeypatch.setattr(faiss_search, "search", noting)
    with faiss_build.threads(8):
        for num_queries in (1, 30, 50, 500):
            index.search(make_vectors(num_queries), 5)
        index.search(make_vectors(500), 5, num_threads=3)
    assert seen == [1, 1, 2, 8, 3]


def test_float64_queries_are_taken_and_no_query_gives_no_hit(build: Build) -> None:
    vectors = make_vectors(300)
    out, _ = build(vectors)
    index = open_index(out)
    assert index.search(vectors[:3].astype(np.float64), 1).rows[:, 0].tolist() == [0, 1, 2]
    assert index.search(np.empty((0, DIM), np.float32), 5).rows.shape == (0, 5)


@pytest.mark.parametrize(
    ("queries", "k", "message"),
    [
        (make_vectors(2, DIM - 1), 5, "queries: found 15 dimensions, and 16 are needed; use one model for both"),
        (make_vectors(2)[0], 5, r"queries: found float32 of shape \(16,\)"),
        (make_vectors(2).astype(np.int64), 5, "queries: found int64"),
        (make_vectors(2).tolist(), 5, "queries: found list"),
        (np.full((1, DIM), np.nan, np.float32), 5, "queries: row 0 has L2 norm nan"),
        (np.vstack([make_vectors(1), np.full((1, DIM), np.inf, np.float32)]), 5, "queries: row 1 has L2 norm inf"),
        (make_vectors(2) * np.float32(2), 5, "queries: row 0 has L2 norm 2; it must be 1"),
        (make_vectors(2), 0, "k is 0; ask for 1 result or more"),
        (make_vectors(2), -3, "k is -3"),
    ],
)
def test_bad_queries_are_refused(build: Build, queries: object, k: int, message: str) -> None:
    out, _ = build()
    with pytest.raises(RetrievalError, match=message):
        open_index(out).search(queries, k)


def test_the_index_file_is_one_that_faiss_itself_reads(build: Build) -> None:
    vectors = make_vectors(300)
    out, _ = build(vectors, ids=make_ids(300))
    _, rows = faiss.read_index(str(out / "index.faiss")).search(vectors[:9], 1)
    assert rows[:, 0].tolist() == list(range(9))
