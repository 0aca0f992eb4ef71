"""Recall is measured against the exact answer, on the queries that people will ask."""

from pathlib import Path

import numpy as np
import pytest
from index_samples import Build, make_pictures_and_captions, make_vectors

from index import engine
from index.recall import MAX_QUERIES, RecallMeter, RecallQueries, choose_queries
from index.search import open_index
from index.vectors import VectorTable


def brute_force(table: VectorTable, queries: np.ndarray, k: int) -> np.ndarray:
    scores = queries.astype(np.float64) @ np.vstack(list(table.blocks())).astype(np.float64).T
    return np.argsort(-scores, axis=1, kind="stable")[:, :k]


def make_table(vectors: np.ndarray) -> VectorTable:
    return VectorTable(len(vectors), vectors.shape[1], vectors)


def share_found(found: np.ndarray, exact: np.ndarray) -> float:
    return float(np.mean([len(set(a) & set(b)) / len(b) for a, b in zip(found.tolist(), exact.tolist(), strict=True)]))


@pytest.mark.parametrize("kind", ["hnsw", "ivf"])
def test_the_manifest_tells_the_recall_that_a_reader_of_the_version_gets(build: Build, kind: str) -> None:
    pictures, captions = make_pictures_and_captions(6000, 200)
    out, manifest = build(pictures, kind=kind, queries=captions, target_recall=0.8)
    found = open_index(out).search(captions, 10).rows
    expected = share_found(found, brute_force(make_table(pictures), captions, 10))
    assert manifest.recall_at_10 == pytest.approx(expected, abs=1e-9)
    assert 0.8 <= manifest.recall_at_10 < 1.0
    assert (manifest.num_recall_queries, manifest.recall_query_kind) == (200, "text")


@pytest.mark.parametrize(("kind", "name"), [("hnsw", "ef_search"), ("ivf", "nprobe")])
def test_a_higher_target_buys_recall_with_a_slower_search(build: Build, tmp_path: Path, kind: str, name: str) -> None:
    pictures, captions = make_pictures_and_captions(6000, 200)
    _, fast = build(pictures, kind=kind, queries=captions, target_recall=0.1, out=tmp_path / "fast")
    _, thorough = build(pictures, kind=kind, queries=captions, target_recall=0.999, out=tmp_path / "thorough")
    assert fast.parameters[name] < thorough.parameters[name]
    assert fast.recall_at_10 < thorough.recall_at_10
    assert thorough.recall_at_10 > 0.98


def test_without_queries_vectors_of_the_table_are_asked_at_a_careful_setting(build: Build) -> None:
    """Pictures find each other where captions find nothing, so the cheap settings are not trusted."""
    pictures, _ = make_pictures_and_captions(6000, 1)
    _, manifest = build(pictures, kind="hnsw")
    assert (manifest.num_recall_queries, manifest.recall_query_kind) == (MAX_QUERIES, "sampled")
    assert manifest.parameters["ef_search"] == 256


def test_no_given_queries_are_none(build: Build) -> None:
    _, manifest = build(queries=np.empty((0, 16), np.float32))
    assert (manifest.num_recall_queries, manifest.recall_query_kind) == (300, "sampled")


def test_queries_of_a_kind_are_named_so_and_their_number_is_bounded(build: Build) -> None:
    _, manifest = build(queries=make_vectors(3 * MAX_QUERIES, seed=5), query_kind="image")
    assert (manifest.num_recall_queries, manifest.recall_query_kind) == (MAX_QUERIES, "image")


def test_a_sampled_query_does_not_count_itself_as_found() -> None:
    table = make_table(make_vectors(50))
    meter = RecallMeter(table, choose_queries(table, None, "text"), brute_force)

    def only_itself(queries: np.ndarray, k: int) -> np.ndarray:
        return np.hstack([brute_force(table, queries, 1), np.full((len(queries), k - 1), -1)])

    assert meter.measure(only_itself) == 0.0
    assert meter.measure(lambda queries, k: brute_force(table, queries, k)) == 1.0


def test_half_of_the_neighbours_is_a_recall_of_one_half() -> None:
    table = make_table(make_vectors(500))
    meter = RecallMeter(table, RecallQueries(make_vectors(20, seed=9), "text"), brute_force)
    far = np.tile(np.arange(5), (20, 1))

    def half(queries: np.ndarray, k: int) -> np.ndarray:
        ranked = brute_force(table, queries, 500)
        return np.hstack([ranked[:, :5], ranked[:, -5:]]) if k == 10 else far

    assert meter.measure(half) == 0.5


def test_any_of_equal_vectors_counts_as_found() -> None:
    """Forty copies of one picture: which ten of them come back does not matter."""
    copies = np.repeat(make_vectors(1), 40, axis=0)
    table = make_table(np.vstack([copies, make_vectors(60, seed=3)]))
    meter = RecallMeter(table, RecallQueries(copies[:1], "text"), brute_force)
    assert meter.measure(lambda queries, k: np.arange(30, 30 + k)[None]) == 1.0
    assert meter.measure(lambda queries, k: np.arange(35, 35 + k)[None]) == 0.5


@pytest.mark.parametrize("k", [1, 10, 70, 1000])
def test_brute_force_over_blocks_is_brute_force_over_the_whole(monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    """15 blocks of 64 rows and one of 40: more neighbours are wanted than one block has."""
    monkeypatch.setattr("index.vectors.BLOCK_ROWS", 64)
    table, queries = make_table(make_vectors(1000)), make_vectors(50, seed=4)
    assert len(list(table.blocks())) == 16
    assert (engine.nearest_in_table(table, queries, k) == brute_force(table, queries, k)).all()


def test_an_exact_index_is_measured_too(build: Build) -> None:
    _, manifest = build(make_vectors(1000), queries=make_vectors(50, seed=4))
    assert (manifest.recall_at_10, manifest.num_recall_queries) == (1.0, 50)
