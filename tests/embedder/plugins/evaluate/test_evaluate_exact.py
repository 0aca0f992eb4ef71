"""Ranks and best scores of exact search, streamed, against the plainest reckoning there is."""

import numpy as np
import pytest

from embedder.plugins.evaluate import exact
from embedder.plugins.evaluate.exact import RelevantPairs, right_rows, search_exactly
from embedder.retrieval.rank_metrics import best_ranks

DIM = 4
NOBODY = RelevantPairs(np.empty(0, np.int64), np.empty(0, np.int64))


def unit(values):
    return (values / np.linalg.norm(values, axis=1, keepdims=True)).astype(np.float32)


def blocks_of(vectors, rng, num_cuts):
    """The vectors cut anywhere, so that a clip's segments may lie in two blocks."""
    cuts = np.sort(rng.integers(0, len(vectors) + 1, num_cuts))
    return lambda: iter(np.split(vectors, cuts))


def rank_by_hand(scores, items, right):
    """Sort the wrong items by their best segment, and count those that are not clearly below the right one."""
    best = {item: max(scores[items == item]) for item in set(items.tolist())}
    own = max((best[item] for item in right if item in best), default=None)
    if own is None:
        return len(best)
    return sum(score > own - exact.TIE for item, score in best.items() if item not in right)


@pytest.mark.parametrize("seed", range(25))
def test_ranks_and_best_scores_are_those_of_a_plain_search(seed, monkeypatch):
    monkeypatch.setattr(exact, "MAX_SCORES", 60)  # parts of a few rows, that cut blocks again
    rng = np.random.default_rng(seed)
    num_rows, num_queries, k = int(rng.integers(1, 60)), int(rng.integers(1, 12)), int(rng.integers(1, 15))
    items = np.unique(rng.integers(0, rng.integers(1, num_rows + 1), num_rows), return_inverse=True)[1]
    vectors = unit(rng.standard_normal((num_rows, DIM)))
    vectors[rng.integers(0, num_rows, num_rows // 3)] = vectors[0]  # duplicates, which tie
    queries = unit(rng.standard_normal((num_queries, DIM)))
    right = {q: set(rng.choice(items, rng.integers(1, 4)).tolist()) for q in range(num_queries)}
    pairs = [(q, item) for q, chosen in right.items() for item in chosen]
    answers = right_rows(np.array([q for q, _ in pairs]), np.array([item for _, item in pairs]), items)
    asked = RelevantPairs(rng.integers(0, num_queries, 30), rng.integers(-1, num_rows, 30))

    found = search_exactly(queries, blocks_of(vectors, rng, 3), items, answers, k, asked)

    scores = queries @ vectors.T
    assert found.ranks.tolist() == [rank_by_hand(scores[q], items, right[q]) for q in range(num_queries)]
    np.testing.assert_allclose(found.scores, -np.sort(-scores, axis=1)[:, :k], atol=1e-6)
    expected = np.where(asked.rows >= 0, scores[asked.queries, asked.rows], -np.inf)
    np.testing.assert_allclose(found.asked_scores, expected, atol=1e-6)


def test_with_one_row_an_item_ranks_are_those_that_the_demo_and_the_guards_reckon_with():
    rng = np.random.default_rng(0)
    pictures, queries = unit(rng.standard_normal((200, 16))), unit(rng.standard_normal((50, 16)))
    concepts = rng.integers(0, 40, 200)
    asked = rng.integers(0, 40, 50)
    numbers, rows = np.nonzero(asked[:, None] == concepts[None])
    found = search_exactly(queries, lambda: iter([pictures]), np.arange(200), RelevantPairs(numbers, rows), 10, NOBODY)
    has_answer = np.isin(asked, concepts)
    assert found.ranks[has_answer].tolist() == best_ranks(queries, asked, pictures, concepts)[has_answer].tolist()
    assert has_answer.sum() > 40


def test_vectors_that_are_all_alike_find_nothing():
    same = np.full((9, DIM), 0.5, np.float32)
    own = RelevantPairs(np.arange(9), np.arange(9))
    found = search_exactly(same, lambda: iter([same]), np.arange(9), own, 3, NOBODY)
    assert found.ranks.tolist() == [8] * 9


def test_right_rows_are_all_rows_of_the_right_items():
    items = np.array([2, 0, 2, 1, 0])
    pairs = right_rows(np.array([0, 1, 1]), np.array([2, 0, 3]), items)
    assert sorted(zip(pairs.queries.tolist(), pairs.rows.tolist(), strict=True)) == [(0, 0), (0, 2), (1, 1), (1, 4)]
