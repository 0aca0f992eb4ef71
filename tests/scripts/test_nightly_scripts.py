"""The nightly script tries again what passes by itself, and hands signals on; the examples call what there is."""

import configparser
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
SCRIPT = SCRIPTS / "nightly_refresh.py"


@pytest.fixture
def fake_embedder(tmp_path):
    """A package `embedder` that notes its arguments and does what Python code says; gives how to call the script."""
    (tmp_path / "embedder").mkdir()
    (tmp_path / "embedder" / "__init__.py").touch()
    calls = tmp_path / "calls"

    def call(body, *options, wait=True):
        program = f"import sys, time, signal\nopen({str(calls)!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n{body}\n"
        (tmp_path / "embedder" / "__main__.py").write_text(program)
        command = [sys.executable, SCRIPT, "nightly.toml", "--wait-s", "0.1", *options]
        process = subprocess.Popen(command, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        if not wait:
            return process, calls
        stdout, stderr = process.communicate(timeout=60)
        return process.returncode, stdout + stderr, calls.read_text().splitlines()

    return call


@pytest.mark.medium
@pytest.mark.parametrize(
    ("body", "code", "num_calls"),
    [
        ("sys.exit(0)", 0, 1),
        ("sys.exit(2)", 2, 1),
        ("print('embedder: the disk was away', file=sys.stderr); sys.exit(1)", 1, 3),
        ("print('embedder: guard retire: 4 of 4 are gone', file=sys.stderr); sys.exit(1)", 1, 1),
        (f"sys.exit(0 if open({'calls'!r}).read().count('refresh') == 2 else 1)", 0, 2),
    ],
)
def test_only_what_passes_by_itself_is_tried_again(fake_embedder, body, code, num_calls):
    found, output, calls = fake_embedder(body)
    assert (found, len(calls)) == (code, num_calls), output


@pytest.mark.medium
def test_options_after_the_dashes_go_to_the_refresh(fake_embedder):
    _, _, calls = fake_embedder("sys.exit(0)", "--", "--max-hours", "6", "--retry-rejects")
    assert calls == ["refresh nightly.toml --max-hours 6 --retry-rejects"]


def test_a_request_to_stop_reaches_the_refresh_and_nothing_is_tried_again(fake_embedder):
    body = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(1)); time.sleep(60)"
    process, calls = fake_embedder(body, wait=False)
    deadline = time.monotonic() + 30
    while not calls.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 1
    assert len(calls.read_text().splitlines()) == 1


def test_the_examples_call_the_script_with_options_that_there_are():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(SCRIPTS / "nightly" / "embedder-refresh.service")
    crontab = (SCRIPTS / "nightly" / "crontab").read_text().splitlines()[-1]
    for line in (unit["Service"]["ExecStart"], crontab):
        words = shlex.split(line)
        assert "scripts/nightly_refresh.py" in words
        assert words[-3:] == ["--", "--max-hours", "6"]
