"""The measurement of a night of changes, at a hundredth of its size; it compares all rows after each step by itself."""

import pytest
from script_runs import found_by


@pytest.mark.slow
def test_marks_write_twice_what_changed_at_most():
    found = found_by("measure_marks.py", "--rows", "20000", "--width", "64")
    for night in ("scattered", "side_by_side"):
        assert found["marked"][night]["written_over_changed"] <= found["marked"][night]["limit"]
        assert found["written_anew"][night]["written_over_changed"] > 3 * found["marked"][night]["written_over_changed"]
