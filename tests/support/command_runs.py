"""Runs of the command `embedder`, in this process or in one of its own."""

import io
import json
import subprocess
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple
from unittest.mock import patch

from embedder.cli import main


class Ended(NamedTuple):
    """Exit code and output of a command."""

    code: int
    stdout: str
    stderr: str

    @property
    def found(self):
        """The JSON of its last line."""
        return json.loads(self.stdout.strip().splitlines()[-1])


def run_here(*arguments) -> Ended:
    """Run it in this process, which saves seconds of imports."""
    out, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(errors), patch.object(sys, "argv", ["embedder", *map(str, arguments)]):
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = ended.code or 0
        except Exception:  # noqa: BLE001  # as the interpreter ends a program
            traceback.print_exc()
            code = 1
    return Ended(code, out.getvalue(), errors.getvalue())


def run_apart(*arguments, timeout_s: float = 120) -> Ended:
    """Run it in its own process."""
    command = [sys.executable, "-m", "embedder", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    return Ended(done.returncode, done.stdout, done.stderr)
