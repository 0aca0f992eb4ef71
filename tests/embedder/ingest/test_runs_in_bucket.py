"""Whole runs into a store on `s3://`: killed, two at once, watched by a reader, on Ray."""

import os
import signal
import subprocess
import threading
import time

import pytest
import samples
from embedding_runs import assert_same
from killed_runs import command, rows_of, run_to_the_end
from store_samples import INFO, publish_rows, row

import embedder
from embedder.errors import StoreError
from embedder.store.files import StoreFiles
from embedder.store.layout import read_current
from embedder.store.lock import write_lock
from embedder.store.store_info import bind_store
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
    assert len({info.path.split("/")[1] for info in files.list("runs")}) == 1, "the second call went on with the run"


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


@pytest.mark.slow
def test_of_two_runs_at_once_one_embeds_and_the_other_is_refused_or_finds_it_done(
    source, tiny_model, bucket, undisturbed, monkeypatch
):
    monkeypatch.setenv("EMBEDDER_LEASE_S", "30")
    store = f"{bucket}/store"
    processes = [start(source, tiny_model, store) for _ in range(2)]
    errors = [process.communicate(timeout=200)[1] for process in processes]
    codes = [process.returncode for process in processes]
    assert sorted(codes) in ([0, 2], [0, 0]), errors
    assert sum("publishing" in error for error in errors) == 1
    runs = {info.path.split("/")[1] for info in StoreFiles(store).list("runs") if info.path.endswith("/run.json")}
    assert len(runs) == 1
    assert_same(rows_of(store), undisturbed)


@pytest.mark.slow
def test_a_run_that_slept_while_another_finished_its_work_publishes_nothing(source, tiny_model, bucket, undisturbed):
    store = f"{bucket}/store"
    files, sleeper = StoreFiles(store), start(source, tiny_model, store)
    signal_after(sleeper, files, 2, signal.SIGSTOP)
    assert_same(run_to_the_end(source, tiny_model, store), undisturbed)
    published, report = read_current(files), files.read(f"runs/{read_current(files).run_id}/report.json")
    sleeper.send_signal(signal.SIGCONT)
    _, stderr = sleeper.communicate(timeout=120)
    assert sleeper.returncode == 1, stderr
    assert "another one took the store over" in stderr
    assert "Traceback" not in stderr
    assert read_current(files) == published
    assert files.read(f"runs/{published.run_id}/report.json") == report
    assert_same(rows_of(store), undisturbed)
    assert_same(run_to_the_end(source, tiny_model, store), undisturbed)


@pytest.mark.usefixtures("starts_ray")
@pytest.mark.slow
def test_a_run_on_ray_writes_from_its_workers_into_the_bucket(source, tiny_model, bucket, undisturbed):
    store = f"{bucket}/store"
    assert_same(run_to_the_end(source, tiny_model, store, "ray", "num_stages=1"), undisturbed)
    assert StoreFiles(store).read(".lock").startswith(b'{"released"')


@pytest.mark.slow
def test_a_reader_that_polls_sees_whole_states_only(bucket):
    files = StoreFiles(f"{bucket}/store")
    bind_store(files, INFO)
    names, seen, problems, ended = [f"{n}.jpg" for n in range(12)], [], [], threading.Event()

    def poll() -> None:
        while not ended.is_set():
            try:
                store = embedder.open_store(files.address)
                rows = store.to_arrow(["item_id", "content_version", "run_id"]).to_pylist()
                items = store.items().to_pylist()
            except StoreError as error:
                if "nothing is published yet" not in str(error):
                    problems.append(error)
                continue
            state = {each["content_version"] for each in rows} | {each["content_version"] for each in items}
            if len(state) != 1 or len(rows) != len(names) or len(items) != len(names):
                problems.append((len(rows), len(items), state))
            seen.append(min(state))

    readers = [threading.Thread(target=poll) for _ in range(2)]
    for reader in readers:
        reader.start()
    for number in range(6):
        publish_rows(StoreFiles(files.address), *(row(name, content_version=f"v{number}") for name in names))
    ended.set()
    for reader in readers:
        reader.join()
    assert problems == []
    assert len(set(seen)) >= 2, "the readers saw the store change"
