"""The benchmark of the index on tiny input: whom it measures, and how it compares; no clock is judged."""

import numpy as np
import pytest
from bench_retrieval import cost_at, ratios
from retrieval_peers import recall_by_score
from script_runs import found_by
from vector_shapes import make_shape

pytestmark = pytest.mark.medium

NUM_IMAGES, DIM = 1500, 16


@pytest.fixture(scope="module")
def measured():
    only = ["faiss-hnsw", "faiss-pq-fast-scan", "faiss-sq-fast-scan", "hnswlib"]
    chosen = ["--dim", DIM, "--shapes", "matryoshka", "--only", *only]
    return found_by("bench_retrieval.py", NUM_IMAGES, *chosen)


@pytest.fixture
def found(measured):
    return measured["shapes"]["matryoshka, k = 10"]


def test_ours_and_the_peers_reach_the_recall_on_captions_that_none_has_seen(found):
    for name in ("embedder, fastest", "embedder, small", "faiss-hnsw", "faiss-pq-fast-scan"):
        contestant = found["contestants"][name]
        assert max(point["recall"] for point in contestant["curve"]) >= 0.95
        assert contestant["at"]["0.95"]["ms"] > 0
        assert contestant["at"]["0.95"]["batch_ms"] > 0
        assert contestant["build_s"] > 0
    assert found["contestants"]["faiss-hnsw"]["bytes"] >= NUM_IMAGES * DIM * 4
    assert found["contestants"]["faiss-hnsw"]["version"].startswith("faiss-cpu 1.")


def test_a_peer_that_is_not_installed_or_fails_is_listed_with_the_reason(found):
    contestants = found["contestants"]
    assert "hnswlib" in contestants["hnswlib"]["reason"]
    assert "could not parse code description SQ8fs" in contestants["faiss-sq-fast-scan"]["reason"]
    assert contestants["hnswlib"]["at"] == contestants["faiss-sq-fast-scan"]["at"] == {}


def test_ours_is_compared_with_the_best_that_takes_no_more_memory_and_with_the_best():
    def contestant(ms, num_bytes):
        return {"at": {"0.95": {"ms": ms}}, "bytes": num_bytes}

    measured = {
        "embedder, fastest": contestant(2.0, 20),
        "embedder, small": contestant(4.0, 5),
        "hnswlib": contestant(1.0, 30),
        "scann": contestant(3.0, 20),
        "lorann": contestant(None, 1),
    }
    fastest, small = ratios(measured, "0.95")
    assert (fastest["no_larger_peer"], fastest["no_larger_ratio"]) == ("scann", 1.5)
    assert (fastest["all_peer"], fastest["all_ratio"]) == ("hnswlib", 0.5)
    assert (small["no_larger_peer"], small["no_larger_ratio"]) == (None, None)
    assert (small["all_peer"], small["all_ratio"]) == ("hnswlib", 0.25)


def test_a_cost_at_a_recall_lies_between_the_nearest_two_that_none_betters():
    points = [(0.99, 4.0), (0.9, 1.0), (0.93, 9.0), (0.5, 0.1)]
    assert cost_at(points, 0.9) == pytest.approx(1.0)
    assert cost_at(points, 0.945) == pytest.approx(2.0)
    assert cost_at(points, 0.1) == pytest.approx(0.1)
    assert cost_at(points, 0.995) is None
    assert cost_at([], 0.9) is None


def test_a_row_as_near_as_the_last_counts_once_and_a_missing_one_does_not():
    images, captions = make_shape("duplicates", 300, 20, 16, seed=1)
    scores = np.sort(captions @ images.T, axis=1)[:, ::-1]
    nearest = np.argsort(-(captions @ images.T), axis=1)[:, :10]
    assert recall_by_score(nearest, images, captions, scores[:, 9]) == 1
    half = np.concatenate([nearest[:, :5], nearest[:, :5]], axis=1)
    assert recall_by_score(half, images, captions, scores[:, 9]) == 0.5
    missing = np.where(np.arange(10) < 3, nearest, -1)
    assert recall_by_score(missing, images, captions, scores[:, 9]) == pytest.approx(0.3)
    twin = np.flatnonzero((images == images[nearest[0, 9]]).all(axis=1))
    swapped = nearest.copy()
    swapped[0, 9] = twin[~np.isin(twin, nearest[0])][0] if (~np.isin(twin, nearest[0])).any() else nearest[0, 9]
    assert recall_by_score(swapped, images, captions, scores[:, 9]) == 1
