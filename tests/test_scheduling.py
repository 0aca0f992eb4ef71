"""The tests leave the machine to others: none ends under another scheduling policy than it began under."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LEAVES_ANOTHER = """
import os

def test_one_that_leaves_another_policy():
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

def test_the_next():
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
"""


def test_this_process_shares_the_cores_as_usual():
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


@pytest.mark.medium
def test_a_test_that_leaves_its_process_under_another_policy_fails_and_the_next_is_not_harmed(tmp_path):
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_policy.py").write_text(LEAVES_ANOTHER)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-n", "0", str(tmp_path)]
    plain = os.environ | {"PYTEST_ADDOPTS": "", "PYTHONPATH": str(Path(__file__).with_name("support"))}
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=plain)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "2 passed, 1 error" in ended.stdout
    assert "left the process under 3" in ended.stdout
