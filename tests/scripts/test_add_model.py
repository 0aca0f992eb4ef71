"""The script that adds a model to a store, on few items."""

import pytest
from script_runs import found_by


@pytest.mark.slow(rotates=True)
@pytest.mark.timeout(400)
def test_a_second_model_is_added_through_a_kill_and_no_other_file_changes():
    found = found_by("add_model.py", 300, timeout_s=300)
    assert (found["main_files_changed"], found["second_rows_kept"], found["is_whole"]) == ([], True, True)
    assert 150 <= found["killed_after_items"] < found["items"]
    assert found["main_files"] > 5
    assert [run["code"] for run in found["runs"]] == [0, -9, 0, 0]
