"""kill -9, SIGTERM and Ctrl-C at several points of a run: the same command continues and ends in the same store."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import samples
from deltalake import DeltaTable
from embedding_runs import assert_same
from killed_runs import command, run_to_the_end

import embedder
from embedder.store_index.index_versions import manifest_of

pytestmark = pytest.mark.medium

NUM_IMAGES, NUM_CLIPS = 120, 2


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return samples.folder(tmp_path_factory.mktemp("killed") / "in", num_images=NUM_IMAGES, num_clips=NUM_CLIPS)


def signalled(arguments, num_entries, number):
    """Start a run, send the signal once so many journal entries are written, and wait for the end."""
    # Into a file: daemons of a killed driver's Ray would hold a pipe open until they have noticed.
    log = Path(f"{arguments[2]}.log")
    with log.open("w") as stderr:
        process = subprocess.Popen(command(*arguments), stdout=subprocess.DEVNULL, stderr=stderr)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if len(list(Path(arguments[2]).glob("runs/*/journal/*.json"))) >= num_entries:
            os.kill(process.pid, number)
            break
        time.sleep(0.005)
    return process.wait(timeout=120), log.read_text()


@pytest.fixture(scope="module")
def undisturbed(source, tiny_model, tmp_path_factory):
    return run_to_the_end(source, tiny_model, tmp_path_factory.mktemp("killed") / "undisturbed")


@pytest.mark.parametrize("num_entries", [0, 6])
def test_a_run_killed_at_any_moment_goes_on_and_ends_in_the_same_rows(
    source, tiny_model, tmp_path, undisturbed, num_entries
):
    arguments = (source, tiny_model, tmp_path / "store")
    code, _ = signalled(arguments, num_entries, signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert not (tmp_path / "store" / "CURRENT.json").exists()
    assert not DeltaTable.is_deltatable(str(tmp_path / "store" / "embeddings")), "no reader sees half a run"
    assert_same(run_to_the_end(*arguments), undisturbed)
    assert len(list((tmp_path / "store" / "runs").iterdir())) == 1, "the second call continued the first one's run"
    opened = embedder.open_store(tmp_path / "store")
    assert manifest_of(opened.files, opened.current.index).num_vectors == opened.to_arrow().num_rows


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_stopped_run_finishes_what_is_in_flight_and_says_how_to_go_on(
    source, tiny_model, tmp_path, undisturbed, number
):
    arguments = (source, tiny_model, tmp_path / "store")
    code, stderr = signalled(arguments, 2, number)
    assert code == 1
    assert "the same command continues" in stderr
    assert "Traceback" not in stderr
    assert not (tmp_path / "store" / "CURRENT.json").exists()
    assert_same(run_to_the_end(*arguments), undisturbed)


IN_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)
"""Takes standard input as the terminal of its session, and becomes the command."""


def test_a_run_whose_terminal_goes_keeps_what_is_finished_and_calls_its_hook(source, tiny_model, tmp_path, undisturbed):
    """As over a connection that is lost: the kernel sends SIGHUP, and refuses what is written to the terminal."""
    hook = f"on_failure.command={json.dumps(['sh', '-c', f'cat > {tmp_path}/summary.json'])}"
    arguments = (source, tiny_model, tmp_path / "store", "local", hook)
    ours, theirs = pty.openpty()
    started = [sys.executable, "-c", IN_TERMINAL, *command(*arguments)]
    process = subprocess.Popen(started, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    deadline = time.monotonic() + 120
    while len(list(Path(arguments[2]).glob("runs/*/journal/*.json"))) < 2:
        if select.select([ours], [], [], 0.005)[0]:
            os.read(ours, 1 << 16)
        assert time.monotonic() < deadline
        assert process.poll() is None
    os.close(ours)
    assert process.wait(timeout=120) == 1
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert re.fullmatch(r"stopped on request after \d+ items, kept .*; the same command continues", summary["message"])
    assert_same(run_to_the_end(*arguments), undisturbed)
