"""Runs a script as a user does, in its own process."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "scripts"


def run_script(name, *arguments, timeout_s=None) -> subprocess.CompletedProcess[str]:
    """Run a script to its end, however that is."""
    command = [sys.executable, str(SCRIPTS / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def last_json(done: subprocess.CompletedProcess[str]) -> dict:
    """The JSON of its last line."""
    assert done.stdout, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def found_by(name, *arguments, timeout_s=None) -> dict:
    """The JSON of the last line of a script that has to succeed."""
    done = run_script(name, *arguments, timeout_s=timeout_s)
    assert done.returncode == 0, done.stderr
    return last_json(done)
