"""The benchmark of several models in one run: the same vectors and labels, of items that are decoded once."""

import pytest
from script_runs import last_json, run_script


@pytest.mark.slow(rotates=True)
def test_one_run_of_three_models_gives_what_three_runs_give():
    done = run_script("bench_models.py", "--images", 12, "--rounds", 1, timeout_s=400)
    found = last_json(done)
    assert found["largest_difference"] <= 1e-6
    assert found["decoded"] == dict.fromkeys(("nothing", "first", "second", "classifier", "together"), 12)
    assert found["over_limit"] > 0
