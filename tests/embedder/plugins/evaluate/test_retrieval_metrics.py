"""Confidence intervals that hold what 95 % promises, figures of groups, latency of known times, the index's ranks."""

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from embedder.plugins.evaluate.evaluate_report import SMALL_GROUP
from embedder.plugins.evaluate.index_recall import IndexedItems, find_items, found_shares, ranks_among
from embedder.plugins.evaluate.retrieval_metrics import by_group, mean, mean_reciprocal_rank, share
from embedder.plugins.evaluate.timing import time_each


def test_wilsons_interval_is_that_of_the_published_example():
    found = share(np.arange(20) < 3)  # 3 of 20: 5.24 % to 36.04 %, by the formula worked by hand
    assert (found.value, found.low, found.high) == pytest.approx((0.15, 0.0524, 0.3604), abs=1e-4)


@pytest.mark.parametrize("value", [0, 1])
def test_even_certain_figures_have_an_interval_within_0_and_1(value):
    for found in (share(np.full(40, bool(value))), mean(np.full(40, float(value)))):
        assert found.value == value
        assert (found.low, found.high) == pytest.approx((0, 0.0876) if value == 0 else (0.9124, 1), abs=1e-4)


def test_95_of_100_intervals_hold_the_true_value():
    rng = np.random.default_rng(0)
    samples = [rng.beta(2, 5, 60) for _ in range(100)]  # true mean 2/7
    held = [found.low <= 2 / 7 <= found.high for found in map(mean, samples)]
    assert 0.89 <= np.mean(held) <= 0.99
    shares = [share(rng.random(60) < 0.9) for _ in range(1000)]
    assert 0.93 <= np.mean([found.low <= 0.9 <= found.high for found in shares]) <= 0.98


def test_the_mean_reciprocal_rank_is_that_of_ranks_counted_from_one():
    assert mean_reciprocal_rank(np.array([0, 1, 3, 9])).value == pytest.approx((1 + 1 / 2 + 1 / 4 + 1 / 10) / 4)


def test_a_query_counts_in_each_group_of_its_right_items_once():
    queries = np.array([0, 0, 1, 2])
    groups = by_group(queries, ["a", "a", "b", "a"], np.array([0, 5, 20]), None, (1, 10))
    assert [(group.name, group.num_queries) for group in groups] == [("a", 2), ("b", 1)]
    assert groups[0].r_at[1].value == 0.5
    assert groups[0].r_at[10].value == 0.5
    assert groups[1].r_at[10].value == 1
    both = by_group(np.array([0, 0]), ["a", "b"], np.array([0]), np.array([0]), (1,))
    assert [group.num_queries for group in both] == [1, 1]


def test_a_small_group_is_marked():
    numbers = np.arange(2 * SMALL_GROUP - 1)
    names = ["large" if number < SMALL_GROUP else "small" for number in numbers]
    groups = by_group(numbers, names, np.zeros(len(numbers), np.int64), None, (1,))
    assert [(group.name, group.is_small) for group in groups] == [("large", False), ("small", True)]


def index_of(order):
    """A search that gives these rows to everyone, in this order, with falling scores."""

    def search(queries, k):
        rows = np.tile(np.array(order)[:k], (len(queries), 1))
        return SimpleNamespace(rows=rows, scores=np.tile(np.linspace(0.9, 0.1, len(order))[:k], (len(queries), 1)))

    return search


def rows_with(items):
    return SimpleNamespace(items=lambda rows: np.where(rows >= 0, np.array(items)[np.maximum(rows, 0)], -1))


def test_search_goes_deeper_until_there_are_enough_items():
    items = [0] * 12 + [1, 2, 3, 4]
    scores, found = find_items(index_of(range(16)), np.zeros((2, 4), np.float32), rows_with(items), 3, 16)
    assert len(set(found[0].tolist())) >= 3
    assert scores.shape == found.shape
    _, all_of_them = find_items(index_of(range(16)), np.zeros((1, 4), np.float32), rows_with(items), 9, 16)
    assert set(all_of_them[0].tolist()) == {0, 1, 2, 3, 4}


def test_ranks_through_the_index_count_items_and_let_ties_stand_before():
    items = np.array([[7, 7, 3, 5, 2], [1, 2, 3, 4, 5], [1, 1, 1, -1, -1]])
    scores = np.array([[0.9, 0.8, 0.7, 0.6, 0.6], [0.5] * 5, [0.9, 0.8, 0.7, -np.inf, -np.inf]], np.float32)
    queries, right = np.array([0, 0, 1, 2]), np.array([5, 8, 1, 4])
    # 7, 3 and the tie with 2 stand before 5; all others tie with 1; 4 is not found.
    assert ranks_among(scores, items, queries, right, 10).tolist() == [3, 4, 10]


def test_recall_of_the_index_counts_a_hit_as_good_as_the_kth():
    exact = SimpleNamespace(scores=np.array([[0.9, 0.8, 0.7], [0.9, 0.5, 0.5]], np.float32))
    found = np.array([[0.9, 0.7, 0.1], [0.5, 0.5, -np.inf]], np.float32)
    assert found_shares(found, exact, 1).tolist() == [1, 0]
    assert found_shares(found, exact, 3) == pytest.approx([2 / 3, 2 / 3])
    assert found_shares(np.hstack([found, found]), exact, 9) == pytest.approx([2 / 3, 2 / 3])


def test_latency_is_reckoned_from_each_query_and_the_budget_ends_it():
    ticks = iter([0.0, *(time for number in range(100) for time in (number, number + (0.5 if number < 98 else 0.9)))])
    found = time_each(lambda query: None, list(range(100)), budget_s=1000, clock=lambda: next(ticks))
    assert (found.p50_ms, found.p99_ms, found.num_queries) == pytest.approx((500, 900, 100))
    ticks = iter(range(1000))
    assert time_each(lambda query: None, list(range(100)), budget_s=5, clock=lambda: next(ticks)).num_queries == 3


def test_the_bootstrap_holds_no_more_draws_than_it_may_and_is_that_of_its_formula():
    values = np.random.default_rng(2).random(50)
    whole = mean(values)
    error = values.std() / np.sqrt(50)
    assert (whole.low, whole.high) == pytest.approx(
        (values.mean() - 1.96 * error, values.mean() + 1.96 * error), abs=0.01
    )
    assert mean(values, max_draws=120) == whole, "the same draws, however many at once"


def test_rows_that_an_index_holds_and_the_table_has_no_more_are_no_item():
    ids = pa.table({"item_id": ["a", "gone", "clip", "clip"], "segment": pa.array([0, 0, 1, 7], pa.int32())})
    pictures = SimpleNamespace(
        numbers_of=lambda names: np.array([{"a": 0, "clip": 1}.get(name.as_py(), -1) for name in names]),
        keys=pa.table({"item_id": ["b", "clip", "a"], "segment": pa.array([0, 1, 0], pa.int32())}),
    )
    rows = IndexedItems(SimpleNamespace(ids=ids), pictures)
    asked = np.array([[0, 1, -1], [2, 3, 0]])
    assert rows.items(asked).tolist() == [[0, -1, -1], [1, 1, 0]]
    assert rows.table_rows(asked).tolist() == [[2, -1, -1], [1, -1, 2]]
