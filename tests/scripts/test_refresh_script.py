"""The measurement of a night, at a third of the size that is promised."""

import pytest
from script_runs import found_by


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_three_thousand_items_without_a_change_take_seconds_and_one_percent_is_one_percent():
    """Of a thousand, what a run that computes takes to start (torch, the model) was as much as the items took."""
    found = found_by("measure_refresh.py", 3_000)
    assert (found["num_items"], found["num_changed"]) == (3_000, 30)
    assert found["idle_cpu_s"] - found["start_cpu_s"] < 10
    assert found["changed_cpu_s"] - found["idle_cpu_s"] < (found["first_cpu_s"] - found["start_cpu_s"]) / 2
