"""`scripts/test_versions`: which legs there are, and their tests. `.ci/run` runs one with each commit."""

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "test_versions"


@pytest.mark.parametrize("leg", ["", "latest"])
def test_a_leg_that_there_is_not_is_refused_with_those_that_there_are(leg):
    ended = subprocess.run([SCRIPT, leg], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert f"found '{leg}'; write oldest, middle or newest" in ended.stderr


def test_the_tests_of_a_leg_exist():
    listed = subprocess.run([SCRIPT, "--list"], capture_output=True, text=True, timeout=60, check=True)
    names = listed.stdout.split()
    assert len(names) > 10
    assert [name for name in names if not (SCRIPT.parents[1] / name).exists()] == []
