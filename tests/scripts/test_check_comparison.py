"""The simulation of `embedder compare`'s intervals, with few trials."""

from script_runs import last_json, run_script


def test_few_trials_are_counted_and_told():
    found = last_json(run_script("check_comparison.py", "--trials", 20, timeout_s=200))
    assert found.keys() >= {"equal_r_at_10", "equal_mrr", "equal_20_groups", "power_told", "power_shown", "passed"}
    assert all(found[name] >= 15 for name in ("equal_r_at_10", "equal_mrr", "equal_20_groups"))
    assert 0.1 < found["power_told"] < 0.3 and found["trials"] == 20
