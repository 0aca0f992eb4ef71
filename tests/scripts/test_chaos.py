"""The chaos script: whoever dies, whenever, nothing is lost, doubled or half published."""

from random import Random

import pytest
from chaos import MOMENTS, PAUSED_ON_RAY, RAY_PROCESSES, STEP_PROCESS, plan_kills
from script_runs import last_json, run_script


def tally_of(*arguments, timeout_s):
    done = run_script("chaos.py", *arguments, timeout_s=timeout_s)
    tally = last_json(done)
    assert tally["faults"] == [] and done.returncode == 0, done.stderr
    for what in ("rows_lost", "rows_duplicated", "rows_differing", "half_published_states", "deviations"):
        assert tally[what] == 0
    assert tally["rows_compared"] > 90 and tally["polls"] > 10
    assert tally["effects"] > 60, "what the runs changed was recorded"
    return tally


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kills_at_several_steps_end_in_the_same_store():
    """Three kills; the thirty of the script, at every step and in every kind of process, take a quarter of an hour."""
    tally = tally_of(3, 0, "--models", 2, "--step", timeout_s=1700)
    assert tally["kills"] >= 2 and tally["comparisons"] >= 1
    assert len(tally["kills_by"]) >= 2
    assert tally["states_seen"] >= 2, "the reader saw the state before and the one after"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_beside_a_paused_driver_the_same_command_is_refused_and_the_paused_run_goes_on():
    tally = tally_of(0, 0, "--pauses", 2, timeout_s=800)
    assert tally["pauses"] == tally["refused_meanwhile"] == tally["ended_well"] == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_in_a_bucket_a_paused_driver_is_overtaken_and_changes_nothing_when_it_wakes():
    tally = tally_of(0, 0, "--pauses", 2, "--bucket", timeout_s=800)
    assert tally["pauses"] == tally["overtaken"] == 2


def test_pauses_meet_every_moment_and_every_kind_of_process():
    plan = [kill for kill in plan_kills(20, Random(0), num_pauses=30) if kill.is_pause]
    assert len(plan) == 30
    assert {kill.moment for kill in plan} >= MOMENTS.keys()
    assert {kill.what for kill in plan} == set(PAUSED_ON_RAY)
    assert {kill.engine for kill in plan} == {"local", "ray"}


def test_thirty_kills_meet_every_moment_and_every_kind_of_process():
    plan = plan_kills(30, Random(0), has_step=True)
    assert len(plan) == 30
    assert {kill.moment for kill in plan} >= MOMENTS.keys()
    assert {kill.what for kill in plan} == {*RAY_PROCESSES, STEP_PROCESS}
    assert STEP_PROCESS not in {kill.what for kill in plan_kills(30, Random(0))}
