"""Hostile inputs by the script that makes them: none crashes, hangs, or passes without a vector or a reason."""

import pytest
from script_runs import last_json, run_script


def tally_of(*arguments, timeout_s):
    done = run_script("hostile_inputs.py", *arguments, timeout_s=timeout_s)
    tally = last_json(done)
    assert tally["faults"] == []
    assert done.returncode == 0
    assert (tally["crashes"], tally["hangs"], tally["other_faults"]) == (0, 0, 0)
    assert tally["slowest_s"] < 30
    return tally


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_inputs_with_all_that_are_crafted_by_hand():
    tally = tally_of(1000, 0, timeout_s=1700)
    assert tally["inputs"] == 1000
    assert tally["decoder_peak_mib"] < 1024 and tally["reader_peak_mib"] < 1024
    expected = {"TooManyPixels", "UnknownKind", "TooLarge", "CaptionNotUtf8", "BrokenTar", "LinkOutsideRoot"}
    assert expected <= set(tally["reasons"])
