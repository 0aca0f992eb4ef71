"""`publish_every_s`: finished work is searched during a run; killed and resumed, it ends in the same rows."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import samples
from command_runs import run_apart, run_here
from embedding_runs import assert_same
from killed_runs import arguments_of, rows_of, run_to_the_end
from model_runs import classifier, other_towers

import embedder
from embedder.config_toml.values import toml
from embedder.store.files import StoreFiles
from embedder.store.publish.history import past_runs

NUM_IMAGES, NUM_CLIPS = 480, 2


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return samples.folder(tmp_path_factory.mktemp("interim") / "in", num_images=NUM_IMAGES, num_clips=NUM_CLIPS)


@pytest.fixture(scope="module")
def undisturbed(source, tiny_model, tmp_path_factory):
    return run_to_the_end(source, tiny_model, tmp_path_factory.mktemp("interim") / "undisturbed")


def killed_in_mid_run(arguments, store, model=None):
    """Start a run, halt it at its first publication, search that, and kill the run; give the rows of a model."""
    store, log = Path(store), Path(f"{store}.log")
    with log.open("w") as stderr:
        process = subprocess.Popen([sys.executable, "-m", "embedder", *arguments], stdout=stderr, stderr=stderr)
    deadline = time.monotonic() + 200
    while not (store / "CURRENT.json").exists():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGSTOP)
    try:
        rows = rows_of(store, model)
        assert len(embedder.open_store(store, model=model).search("red", k=3)) == 3
    finally:
        process.kill()
    assert process.wait(timeout=60) == -signal.SIGKILL, log.read_text()
    return rows


@pytest.mark.medium
def test_a_pause_without_end_leaves_the_publication_at_the_end(tiny_model, tmp_path):
    folder, store = samples.folder(tmp_path / "in", num_images=3), tmp_path / "store"
    ended = run_here(*arguments_of(folder, tiny_model, store, "local", "publish_every_s=inf"))
    assert ended.code == 0, ended.stderr
    assert len(past_runs(StoreFiles(store))) == 1


@pytest.mark.usefixtures("starts_ray")
@pytest.mark.slow
def test_a_run_on_ray_that_publishes_as_it_goes_is_searched_killed_and_resumed(
    source, tiny_model, tmp_path, undisturbed
):
    store = tmp_path / "store"
    arguments = arguments_of(source, tiny_model, store, "ray", "num_stages=1", "publish_every_s=0.02")
    assert 0 < len(killed_in_mid_run(arguments, store)) < len(undisturbed)
    goes_on_to_the_end(arguments, store, undisturbed)


def goes_on_to_the_end(arguments, store, undisturbed):
    """Give the command again after a kill: it continues the same run, and ends in the rows of an undisturbed one."""
    found = rows_of(store)
    assert_same(found, {key: row for key, row in undisturbed.items() if key in found})
    (run_id,) = (path.parent.name for path in (store / "runs").glob("*/run.json"))
    ended = run_apart(*arguments, timeout_s=200) if "ray" in arguments else run_here(*arguments)
    assert ended.code == 0, ended.stderr
    assert_same(rows_of(store), undisturbed)
    history = past_runs(StoreFiles(store))
    assert history[-1].run_id == run_id, "the second call continued the first one's run"
    assert len(history) > 1 and all(past.can_be_read for past in history)
    ended = run_here(*arguments)
    assert "nothing to do" in ended.stdout + ended.stderr


@pytest.mark.slow
def test_rows_of_two_models_come_together_while_the_run_goes_on_and_in_the_end_as_if_it_had_not_been_killed(
    source, tiny_model, tmp_path, undisturbed
):
    file, store = tmp_path / "run.toml", tmp_path / "store"
    models = [{"uri": str(tiny_model)}, {"name": "other", "uri": other_towers(tmp_path)}, classifier(tmp_path)]
    lines = ["rows_per_part = 8", "batch_size = 4", "segment_s = 1.0", "min_vector_spread = 0", 'engine = "local"']
    lines += ["publish_every_s = 0.02", f"store = {toml(str(store))}", "[decode]", "items_per_task = 8"]
    lines += ["[[source]]", f"path = {toml(str(source))}"]
    lines += [line for each in models for line in ("[[model]]", *(f"{key} = {toml(each[key])}" for key in each))]
    file.write_text("\n".join(lines))
    arguments = ["embed", "--config", str(file)]

    found = killed_in_mid_run(arguments, store, "other")

    assert 0 < len(found) < len(undisturbed)
    main = rows_of(store)
    assert found.keys() == main.keys()
    images = [key for key, row in main.items() if row["image_embedding"] is not None]
    assert images and all(main[key]["shades.top"] for key in images)
    goes_on_to_the_end(arguments, store, undisturbed)
    assert rows_of(store, "other").keys() == rows_of(store, "shades").keys() == undisturbed.keys()
