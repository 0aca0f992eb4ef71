"""Paired differences: intervals that hold as often as they say, groups corrected, power that simulation confirms."""

import numpy as np
import pytest

from embedder.retrieval.paired import (
    EVERYTHING,
    Thresholds,
    _percentiles_of_hits,
    describe_failures,
    failures,
    members_of,
    paired_difference,
    paired_differences,
    student_quantile,
)
from embedder.retrieval.rank_metrics import score_ranks

LIMITS = Thresholds()


def hits(rng, shape, share=0.6):
    return (rng.random(shape) < share).astype(float)


def noisy(rng, scores, share):
    """Scores of which a share is drawn again, by the same chance of a hit."""
    return np.where(rng.random(scores.shape) < share, hits(rng, scores.shape), scores)


def test_equal_models_are_called_equal_about_as_often_as_the_confidence_says():
    rng = np.random.default_rng(0)
    called = 0
    for _ in range(300):
        before = hits(rng, 400)
        called += paired_difference(before, noisy(rng, before, 0.3), LIMITS).is_equal
    assert 0.92 <= called / 300 <= 0.98


def test_many_groups_together_raise_no_more_false_alarms_than_one():
    rng = np.random.default_rng(1)
    groups = {str(number): np.arange(60) + 60 * number for number in range(20)}
    corrected = alone = 0
    for _ in range(60):
        before = hits(rng, 1200)
        after = noisy(rng, before, 0.4)
        corrected += all(each.is_equal for each in paired_differences(before, after, groups, LIMITS))
        alone += all(paired_difference(before[own], after[own], LIMITS).is_equal for own in groups.values())
    assert corrected / 60 > 0.88 > alone / 60


def test_a_group_that_lost_is_found_and_named_and_the_others_are_not():
    rng = np.random.default_rng(2)
    before = hits(rng, 3000, 0.8)
    after = noisy(rng, before, 0.1)
    groups = members_of([f"g{number % 10}" for number in range(3000)], np.arange(3000))
    after[groups["g3"]] = hits(rng, 300, 0.4)
    found = failures(paired_differences(before, after, groups, LIMITS), LIMITS)
    assert [each.name for each in found][:1] == ["g3"]
    assert {each.name for each in found} <= {"g3", EVERYTHING}
    said = describe_failures(found, LIMITS, "R@10")
    assert said.startswith("R@10, shown to have lost more than compare.max_drop = 0.02 at 95% confidence: g3 0.")


def test_a_loss_within_what_is_allowed_passes_and_to_be_proven_it_needs_more_queries():
    before = np.ones(200)
    after = before.copy()
    after[:2] = 0
    (found,) = paired_differences(before, after, {}, LIMITS)
    assert found.difference == pytest.approx(-0.01) and not found.fails(LIMITS)
    assert found.fails(Thresholds(prove=True))
    many = paired_difference(np.tile(before, 50), np.tile(after, 50), LIMITS)
    assert not many.fails(Thresholds(prove=True))


def test_power_is_what_simulation_finds():
    rng = np.random.default_rng(3)
    found = [paired_difference(x := hits(rng, 500), noisy(rng, x, 0.2), LIMITS) for _ in range(60)]
    reported = np.mean([each.detectable for each in found])
    seen = 0
    for _ in range(300):
        before = hits(rng, 500)
        after = noisy(rng, before, 0.2)
        lost = rng.random(500) < reported / 0.6  # of the hits, so that the mean loss is what was reported
        seen += paired_difference(before, np.where(lost, 0, after), LIMITS).high < 0
    assert seen / 300 == pytest.approx(0.8, abs=0.1)


def test_queries_that_all_differ_alike_give_an_interval_as_wide_as_chance_may_hide():
    found = paired_difference(np.ones(20), np.ones(20), LIMITS)
    assert (found.low, found.high) == (pytest.approx(-0.168, abs=1e-3), pytest.approx(0.168, abs=1e-3))
    assert 0 < found.power < 0.1 and found.detectable == pytest.approx(0.39, abs=0.01)
    few = paired_difference(np.ones(9), np.zeros(9), LIMITS)
    assert few.is_small and (few.low, few.high) == (-1, 1) and not few.fails(LIMITS)


def test_values_drawn_by_count_and_one_by_one_give_the_same_interval():
    rng = np.random.default_rng(4)
    before, after = hits(rng, 300), hits(rng, 300)
    by_count = paired_difference(before, after, LIMITS)
    jittered = after + rng.normal(0, 1e-9, 300)  # all values different
    one_by_one = paired_difference(before, jittered, LIMITS)
    assert one_by_one.low == pytest.approx(by_count.low, abs=0.006)
    assert one_by_one.high == pytest.approx(by_count.high, abs=0.006)


@pytest.mark.medium
def test_percentiles_of_hits_are_those_of_all_resamples_there_are():
    differences = np.array([1.0, 1.0, 0.0, -1.0] * 3 + [0.0])
    num, draws = len(differences), np.random.default_rng(5)
    sums = np.sort(draws.choice(differences, (400_000, num)).sum(1))
    for outside in (0.02, 0.1, 0.3):
        low, high = _percentiles_of_hits(differences, outside)
        assert low * num == pytest.approx(np.quantile(sums, outside, method="inverted_cdf"))
        assert high * num == pytest.approx(-np.quantile(-sums, outside, method="inverted_cdf"))
    many = np.concatenate([np.ones(3000), np.zeros(94_000), -np.ones(3000)])
    low, high = _percentiles_of_hits(many, 0.025)
    assert (low, high) == (pytest.approx(-0.00152, abs=2e-5), pytest.approx(0.00152, abs=2e-5))  # 1.96 sqrt(0.06 / Q)


@pytest.mark.parametrize(
    ("probability", "freedom", "value"), [(0.975, 9, 2.262), (0.975, 29, 2.045), (0.995, 9, 3.250), (0.9995, 20, 3.850)]
)
def test_quantiles_are_those_of_the_tables(probability, freedom, value):
    assert student_quantile(probability, freedom) == pytest.approx(value, rel=0.01)


def test_a_query_counts_in_each_group_of_its_answers_and_an_empty_group_in_none():
    members = members_of(["a", "b", "a", "a"], np.array([0, 0, 1, 1]))
    assert {name: own.tolist() for name, own in members.items()} == {"a": [0, 1], "b": [0]}
    members["c"] = np.array([], np.int64)
    found = paired_differences(np.ones(2), np.zeros(2), members, LIMITS)
    assert [each.name for each in found] == [EVERYTHING, "a", "b"]
    assert members_of([], np.array([], np.int64)) == {}


def test_metrics_of_ranks():
    ranks = np.array([0, 1, 9, 10])
    assert score_ranks(ranks, "R@10").tolist() == [1, 1, 1, 0]
    assert score_ranks(ranks, "MRR").tolist() == pytest.approx([1, 1 / 2, 1 / 10, 1 / 11])
    assert score_ranks(ranks, "nDCG@10").tolist() == pytest.approx([1, 1 / np.log2(3), 1 / np.log2(11), 0])
    with pytest.raises(ValueError, match="'recall': there is no such metric"):
        score_ranks(ranks, "recall")
