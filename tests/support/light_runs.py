"""Runs of a light installation: this environment, with the packages of all extras hidden from its processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

from command_runs import Ended

from embedder.installation import EXTRAS

SUPPORT = Path(__file__).parent
COMMANDS = """
import json, sys
from command_runs import run_here
print(json.dumps([run_here(*arguments) for arguments in json.loads(sys.argv[1])]))
"""


def run_light(*arguments: str | Path) -> str:
    """Run Python, which has to succeed, and give its standard output."""
    folders = [SUPPORT / "light", SUPPORT, *filter(None, [os.environ.get("PYTHONPATH")])]
    hidden = {package for packages in EXTRAS.values() for package in packages}
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "HIDDEN_PACKAGES": " ".join(sorted(hidden)),
    }
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def commands_light(*commands: list) -> list[Ended]:
    """Run commands of `embedder`, one after the other in one process."""
    answer = run_light("-c", COMMANDS, json.dumps([[str(each) for each in command] for command in commands]))
    return [Ended(*each) for each in json.loads(answer.splitlines()[-1])]
