"""`scripts/test_versions`: which legs there are. CI runs no leg yet: each takes an environment and minutes."""

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
    names = [word for word in SCRIPT.read_text().split() if word.startswith("tests/") and not word.endswith("ivf")]
    assert len(names) > 10
    assert [name for name in names if not (SCRIPT.parents[1] / name).exists()] == []
