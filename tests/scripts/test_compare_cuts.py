"""The comparison of cuts: a tiny model through both, on a Ray of its own; no clock is judged."""

from types import SimpleNamespace

import pytest
from script_runs import found_by

from shards.config import load_model_config


@pytest.mark.slow(rotates=True)
@pytest.mark.timeout(1800)
def test_both_cuts_of_a_tiny_model_are_predicted_and_run_under_a_quota():
    found = found_by("compare_cuts.py", "tiny", 0, 1)
    assert (found["setting"], found["shares"]) == ("tiny", [0.5, 1, 1])
    assert {name: len(rates) for name, rates in found["items_per_s"].items()} == {"thirds": 1, "planned": 1}
    assert all(rate > 0 for rates in found["items_per_s"].values() for rate in rates)
    assert found["predicted_gain"] > 0.999  # the planned cut is the best by the same prediction


def test_the_best_cut_is_the_fastest_and_the_most_even_among_equals():
    from compare_cuts import best_cut, thirds

    from corpus import DEMO_MODEL

    config = load_model_config(DEMO_MODEL)

    def expect(cut):  # as fast as its slowest stage, where a stage takes a second a layer of either tower
        stages = [len(range(*vars(spec.vision).values())) + len(range(*vars(spec.text).values())) for spec in cut]
        return SimpleNamespace(items_per_s=1 / max(stages), stage_s=stages)

    assert [(spec.vision.stop, spec.text.stop) for spec in thirds(config)] == [(1, 1), (3, 3), (4, 4)]
    assert expect(thirds(config)).items_per_s == 1 / 4
    best = best_cut(config, expect)
    assert sorted(expect(best).stage_s) == [2, 3, 3]
    assert (best[-1].vision.stop, best[-1].text.stop) == (4, 4)
