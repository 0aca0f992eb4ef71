"""Lock of a store in a bucket: its holder, when it is taken over, and that a process that lost it publishes nothing."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import datetime

import pytest
from bucket_server import bucket_on, running_server

from embedder.errors import RunFailedError, StoreError
from embedder.store.files import StoreFiles
from embedder.store.layout import Current, read_current, utc_now
from embedder.store.lock import BEATS_PER_LEASE, LOCK_FILE, BucketLease, LeaseLostError, write_lock
from embedder.store.publish.current import move_current

LEASE_S = 3.0  # as the fixture `bucket` sets it
HOLDER = """
import sys
from embedder.store.files import StoreFiles
from embedder.store.layout import Current, utc_now
from embedder.store.publish.current import move_current
from embedder.store.lock import write_lock
files = StoreFiles(sys.argv[1])
with write_lock(files):
    print("held", flush=True)
    sys.stdin.readline()
    move_current(files, Current(run_id="sleeper", embeddings=1, items=1, published_at=utc_now()))
"""


@pytest.fixture
def files(bucket):
    return StoreFiles(f"{bucket}/store")


def state(run_id: str) -> Current:
    return Current(run_id=run_id, embeddings=1, items=1, published_at=utc_now())


def another(files: StoreFiles) -> StoreFiles:
    """The same store, as another process has it."""
    return StoreFiles(files.address)


def holder_process(files: StoreFiles) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, files.address],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "held\n", process.stderr.read()
    return process


def controlled_clock(files: StoreFiles, step_s: float) -> list[float]:
    """Advance the clock of a waiting process by a step with each look at it; the times that it saw."""
    times_s: list[float] = []

    def clock_s() -> float:
        times_s.append(len(times_s) * step_s)
        return times_s[-1]

    files.environment = replace(files.environment, clock_s=clock_s)
    return times_s


def test_a_second_writer_is_refused_and_told_who_holds_the_store_since_when(files, monkeypatch, said):
    with write_lock(files):
        since = json.loads(files.read(LOCK_FILE))["since"]
        reads, read_tagged = [], StoreFiles.read_tagged
        monkeypatch.setattr(StoreFiles, "read_tagged", lambda *call: reads.append(call) or read_tagged(*call))
        with (
            pytest.raises(StoreError, match="another run is writing to it") as refused,
            write_lock(another(files)),
        ):
            pytest.fail("two hold it")
        assert f"process {os.getpid()} on {socket.gethostname()}, since {since}" in str(refused.value)
        assert len(reads) < 4 * BEATS_PER_LEASE, "the holder is seen to be alive before its lease is over"
        assert "watching for 3 s" in said[0]
    said.clear()
    with write_lock(another(files)):
        assert said == [], "what was let go is taken at once"


@pytest.mark.medium
def test_a_lock_outlives_many_leases_while_its_holder_lives(files, monkeypatch):
    monkeypatch.setenv("EMBEDDER_LEASE_S", "0.5")
    with write_lock(files) as lease:
        first = files.read(LOCK_FILE)
        time.sleep(2)
        assert not lease.lost
        assert files.read(LOCK_FILE) != first
        move_current(files, state("alive"))
        move_current(files, state("alive-twice"))
    assert read_current(files).run_id == "alive-twice"


@pytest.mark.medium
def test_the_lock_of_a_killed_process_is_taken_over_after_its_lease_and_not_before(files, said):
    process = holder_process(files)
    process.send_signal(signal.SIGKILL)
    process.wait()
    times_s = controlled_clock(files, step_s=LEASE_S / 4)
    with write_lock(files):
        assert times_s == [0, 0.75, 1.5, 2.25, LEASE_S], "it was watched until its lease was over, and no longer"
        move_current(files, state("second"))
    assert [line.split(";")[0] for line in said][1:] == ["it does not"]
    assert f"process {process.pid}" in said[0]
    assert read_current(files).run_id == "second"
    process.communicate()


@pytest.mark.medium
def test_a_process_that_slept_through_its_lease_publishes_nothing_and_says_so(files):
    sleeper = holder_process(files)
    sleeper.send_signal(signal.SIGSTOP)
    with write_lock(files):
        move_current(files, state("second"))
        sleeper.send_signal(signal.SIGCONT)
        _, stderr = sleeper.communicate("go on\n", timeout=30)
        assert "another one took the store over" in stderr
        assert f"process {os.getpid()}" in stderr
        assert sleeper.returncode != 0
        assert read_current(files).run_id == "second"
        move_current(files, state("second-still-holds-it"))


def test_a_lock_that_somebody_removes_while_it_is_watched_is_free(files):
    dead = {"token": "x", "host": "h", "pid": 1, "since": "2026-01-01T00:00:00+00:00", "lease_s": 60, "beat": 7}
    files.write(LOCK_FILE, json.dumps(dead).encode())
    files.environment = replace(files.environment, sleep=lambda seconds: files.delete(LOCK_FILE))
    with write_lock(files):
        move_current(files, state("second"))


def test_clocks_of_other_machines_decide_nothing(files):
    ages = {"in 1970": "1970-01-01T00:00:00+00:00", "in 2099": "2099-01-01T00:00:00+00:00"}
    for since in ages.values():
        dead = {"token": "x", "host": "h", "pid": 1, "since": since, "lease_s": 0.5, "beat": 7}
        files.write(LOCK_FILE, json.dumps(dead).encode())
        times_s = controlled_clock(files, step_s=0.25)
        with write_lock(files):
            assert times_s == [0, 0.25, 0.5]
    files.environment = replace(files.environment, now=lambda: datetime.fromisoformat(ages["in 1970"]))
    with write_lock(files), pytest.raises(StoreError, match="since 1970"), write_lock(another(files)):
        pytest.fail("two hold it")


@pytest.mark.medium
def test_of_many_that_come_at_once_one_gets_a_new_lock_and_one_a_stale_one(files, monkeypatch):
    monkeypatch.setenv("EMBEDDER_LEASE_S", "1")
    assert outcomes_of(8, files) == ["held"] + ["refused"] * 7
    dead = {"token": "x", "host": "h", "pid": 1, "since": "s", "lease_s": 0.5, "beat": 7}
    files.write(LOCK_FILE, json.dumps(dead).encode())
    assert outcomes_of(8, files) == ["held"] + ["refused"] * 7


def outcomes_of(number: int, files: StoreFiles) -> list[str]:
    outcomes, all_tried, together = [], threading.Event(), threading.Barrier(number)

    def note(outcome: str) -> None:
        outcomes.append(outcome)
        if len(outcomes) == number:
            all_tried.set()

    def attempt() -> None:
        own = another(files)
        together.wait()
        try:
            with write_lock(own):
                note("held")
                all_tried.wait(20)
        except StoreError:
            note("refused")

    threads = [threading.Thread(target=attempt) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return sorted(outcomes)


@pytest.mark.parametrize("is_first", [False, True])
def test_who_published_without_the_lock_is_not_overwritten(files, is_first):
    if not is_first:
        move_current(files, state("first"))
    with write_lock(files):
        move_current(another(files), state("a-stranger"))
        with pytest.raises(LeaseLostError, match="another run published while this one held the lock"):
            move_current(files, state("ours"))
    assert read_current(files).run_id == "a-stranger"


def test_a_run_that_lost_the_store_is_told_that_and_not_how_it_stopped(files):
    with pytest.raises(LeaseLostError, match="took the store over"), write_lock(files) as lease:
        files.write(LOCK_FILE, b'{"token": "other", "pid": 7, "host": "elsewhere", "since": "now", "lease_s": 3}')
        deadline_s = time.monotonic() + 10
        while not lease.lost and time.monotonic() < deadline_s:
            time.sleep(0.05)
        raise RunFailedError("stopped on request")
    assert json.loads(files.read(LOCK_FILE))["token"] == "other", "what is another's is not let go"


def test_a_release_that_fails_harms_nobody(files, monkeypatch):
    with write_lock(files):
        monkeypatch.setattr(StoreFiles, "replace", failing)
    monkeypatch.undo()


def failing(*_):
    raise StoreError("store: access is denied")


@pytest.mark.medium
def test_a_server_that_was_away_for_a_while_does_not_end_a_run(monkeypatch):
    with running_server() as (url, server):
        for bucket in bucket_on(url, monkeypatch):
            monkeypatch.setenv("EMBEDDER_LEASE_S", "0.6")
            files = StoreFiles(f"{bucket}/store")
            with write_lock(files) as lease:
                server.send_signal(signal.SIGSTOP)
                time.sleep(1.5)
                server.send_signal(signal.SIGCONT)
                move_current(files, state("after-the-break"))
                assert not lease.lost
            assert read_current(files).run_id == "after-the-break"


def test_a_server_that_ignores_conditions_is_refused(monkeypatch):
    with running_server("--ignore-conditions") as (url, _):
        for bucket in bucket_on(url, monkeypatch):
            files = StoreFiles(f"{bucket}/store")
            with pytest.raises(StoreError, match="ignores If-Match or If-None-Match"), write_lock(files):
                pytest.fail("a lock without conditions")


def test_a_lease_that_is_no_number_is_refused(files, monkeypatch):
    monkeypatch.setenv("EMBEDDER_LEASE_S", "soon")
    with pytest.raises(StoreError, match="EMBEDDER_LEASE_S is 'soon'; write seconds above 0"):
        BucketLease(files)
