"""Whole runs into a store on `s3://`: killed, next to a holder, on Ray; paused ones: test_chaos."""

import os
import signal
import subprocess
import time

import pytest
import samples
from embedding_runs import assert_same
from killed_runs import command, run_to_the_end

from embedder.store.files import StoreFiles
from embedder.store.lock import write_lock
from embedder.store.tables.tables import RecordTable

NUM_IMAGES = 60


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return samples.folder(tmp_path_factory.mktemp("bucket_runs") / "in", num_images=NUM_IMAGES, num_clips=1)


def start(*arguments):
    return subprocess.Popen(command(*arguments), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def undisturbed(source, tiny_model, tmp_path_factory):
    return run_to_the_end(source, tiny_model, str(tmp_path_factory.mktemp("bucket_runs") / "undisturbed"))


def signal_after(process, files, num_entries, number):
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s and process.poll() is None:
        if sum("/journal/" in info.path for info in files.list("runs")) >= num_entries:
            process.send_signal(number)
            break
        time.sleep(0.01)


@pytest.mark.slow
def test_a_run_into_a_bucket_that_is_killed_goes_on_and_ends_in_the_same_rows(source, tiny_model, bucket, undisturbed):
    store = f"{bucket}/store"
    files, process = StoreFiles(store), start(source, tiny_model, store)
    signal_after(process, files, 5, signal.SIGKILL)
    code = process.wait(60)
    assert code == -signal.SIGKILL, process.stderr.read()
    process.stderr.close()
    assert not files.exists("CURRENT.json")
    assert RecordTable(files, "embeddings").version < 0, "no reader sees half a run"
    assert_same(run_to_the_end(source, tiny_model, store), undisturbed)
    assert len({info.path.split("/")[1] for info in files.list("runs")}) == 1, "the second call continued the run"


@pytest.mark.medium
def test_a_run_of_a_store_that_another_holds_exits_with_a_clear_line(source, tiny_model, bucket, monkeypatch):
    monkeypatch.setenv("EMBEDDER_LEASE_S", "10")  # on a busy machine a process that lives may be silent for seconds
    with write_lock(StoreFiles(f"{bucket}/store")):
        process = start(source, tiny_model, f"{bucket}/store")
        error = process.communicate(timeout=200)[1]
    assert process.returncode == 2, error
    assert "another run is writing to it" in error
    assert f"process {os.getpid()} on " in error
    assert "Traceback" not in error


@pytest.mark.usefixtures("starts_ray")
@pytest.mark.slow
def test_a_run_on_ray_writes_from_its_workers_into_the_bucket(source, tiny_model, bucket, undisturbed):
    store = f"{bucket}/store"
    assert_same(run_to_the_end(source, tiny_model, store, "ray", "num_stages=1"), undisturbed)
    assert StoreFiles(store).read(".lock").startswith(b'{"released"')
