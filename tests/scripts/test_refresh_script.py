"""The measurement of a night, at the size that is promised."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "measure_refresh.py"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_items_without_a_change_take_seconds_and_one_percent_is_one_percent():
    done = subprocess.run([sys.executable, SCRIPT, "10000"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["num_items"], found["num_changed"]) == (10_000, 100)
    assert found["idle_s"] - found["start_s"] < 10
    assert found["changed_s"] < found["first_s"] / 2
