import pytest
from cut_power import has_loop_devices
from script_runs import last_json, run_script

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_loop_devices(), reason="images can't be mounted here (root, loop device, mkfs.ext4)"),
]


def test_a_power_cut_leaves_what_was_said_to_be_done():
    done = run_script("cut_power.py", "8", "3", timeout_s=280)
    result = last_json(done)
    assert (done.returncode, result["cuts"], result["faults"]) == (0, 8, 0), done.stdout
    assert result["publications"] > 8


def test_without_flushes_a_power_cut_loses_rows():
    done = run_script("cut_power.py", "2", "3", "--plant", "sync-nothing", timeout_s=280)
    assert (done.returncode, last_json(done)["faults"]) == (1, 2), done.stdout
