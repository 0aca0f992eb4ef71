"""The chaos script: whoever dies, whenever, nothing is lost, doubled or half published."""

import pytest
from script_runs import last_json, run_script


def tally_of(*arguments, timeout_s):
    done = run_script("chaos.py", *arguments, timeout_s=timeout_s)
    tally = last_json(done)
    assert tally["faults"] == [] and done.returncode == 0, done.stderr
    for what in ("rows_lost", "rows_duplicated", "rows_differing", "half_published_states"):
        assert tally[what] == 0
    assert tally["rows_compared"] > 90 and tally["polls"] > 10
    return tally


@pytest.mark.slow
def test_one_kill_ends_in_the_same_store():
    tally = tally_of(1, 2, timeout_s=200)
    assert tally["kills"] == 1 and tally["comparisons"] == 1
    assert tally["states_seen"] >= 2, "the reader saw the state before and the one after"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_thirty_kills_at_every_step_and_in_every_kind_of_process():
    tally = tally_of(30, 0, timeout_s=3500)
    assert tally["kills"] >= 25
    assert len(tally["kills_by"]) >= 12
