"""Submission to a real Ray cluster of two nodes with its dashboard, behind a token."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import ray_head
import samples
from command_runs import run_here
from light_runs import commands_light

import embedder
from embedder.errors import RunFailedError
from embedder.plugins.deploy.submission.job_server import JobServer
from embedder.plugins.deploy.submission.packages import code_package

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not ray_head.can_start(), reason="the dashboard of Ray needs the packages of ray[default]"),
]
WAIT_S = 480.0
NUM_IMAGES = 60


@pytest.fixture(scope="module")
def head(starts_ray):
    head = ray_head.RayHead()
    yield head
    head.stop()


@pytest.fixture(autouse=True)
def token(head, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", head.token)


@pytest.fixture
def write_config(tiny_model, tmp_path):
    """Writes a configuration of small parts; gives its path and its store."""

    def write(name: str, num_images: int = NUM_IMAGES, **keys) -> tuple[Path, Path]:
        source, store = tmp_path / f"{name}-source", tmp_path / f"{name}-store"
        samples.folder(source, num_images=num_images)
        settings = {"model": str(tiny_model), "store": str(store), "num_stages": 1, "rows_per_part": 8} | keys
        lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
        tables = (
            f'[[source]]\npath = "{source}"\n[decode]\nnum_cpus = 0.3\nitems_per_task = 4\n[cluster]\nshare = 0.5\n'
        )
        path = tmp_path / f"{name}.toml"
        path.write_text("\n".join(lines) + "\n" + tables)
        return path, store

    return write


def until(is_there, what):
    deadline_s = time.monotonic() + WAIT_S
    while not (found := is_there()):
        assert time.monotonic() < deadline_s, f"no {what} within {WAIT_S:g} s"
        time.sleep(0.2)
    return found


def ended(job):
    return until(lambda: (info := job.info()).is_over and info, f"end of {job.job_id}: {job.log()}")


def rows(store):
    found = embedder.open_store(str(store)).to_arrow(["item_id", "image_embedding"]).sort_by("item_id")
    return found["item_id"].to_pylist(), np.array(found["image_embedding"].to_pylist(), np.float32)


def check_rows(store, path):
    """The store holds what a run in one process makes of the same configuration."""
    here = embedder.load_config(path, {"store": f"{store}-here", "engine": "local"})
    embedder.embed(here)
    ids, vectors = rows(store)
    expected_ids, expected = rows(here.store)
    assert ids == expected_ids and len(set(ids)) == len(ids)
    np.testing.assert_allclose(vectors, expected, atol=1e-6)


def test_a_light_installation_submits_follows_and_lists_and_ray_exports_the_counters(head, write_config):
    path, store = write_config("light")
    followed, listed = commands_light(
        ["submit", path, "--address", head.url, "--follow", "--json"], ["jobs", "list", "--address", head.url, "--json"]
    )
    assert followed.code == 0, followed.stdout + followed.stderr
    assert followed.found["status"] == "SUCCEEDED" and "publishing" in followed.stdout
    (job,) = listed.found["jobs"]
    assert (job["job_id"], job["status"], job["exit_code"]) == (followed.found["job_id"], "SUCCEEDED", 0)
    assert job["metadata"]["store"] == str(store)
    check_rows(store, path)
    again = commands_light(["jobs", "logs", job["job_id"], "--address", head.url])[0]
    assert again.code == 0 and again.stdout.strip() in followed.stdout
    wanted = {"items", "vectors", "part_bytes", "step_seconds", "step_rows", "step_bytes"}
    pattern = r"^ray_embedder_(\w+?)(?:_total)?\{"
    assert until(lambda: wanted <= set(re.findall(pattern, head.metrics(), re.M)), "counters of write tasks")


def test_the_code_that_runs_is_the_one_that_was_sent(head):
    """A job of Ray with the package of a submission; the command prints where its code is from."""
    server, package = JobServer(head.url), code_package()
    server.upload(package.name, package.content)
    assert server.has_package(package.name) and not server.has_package("_ray_pkg_" + "0" * 40 + ".zip")
    request = {
        "submission_id": "where",
        "entrypoint": "python -c 'import embedder; print(embedder.__file__)'",
        "runtime_env": {"py_modules": [package.uri]},
    }
    assert server.submit(request) == "where"
    assert server.submit(request) == "where", "a request that is repeated begins nothing"
    assert until(lambda: server.job("where").is_over, "end")
    assert str(head.folder) in server.log("where").strip().splitlines()[-1]


def parts(store):
    return list(store.glob("runs/*/journal/*.json"))


def test_two_jobs_fill_two_stores_and_one_that_was_killed_and_stopped_goes_on_when_submitted_again(head, write_config):
    (path, store), (second_path, second_store) = write_config("killed", 300), write_config("second", 100)
    config, server = embedder.load_config(path), JobServer(head.url)
    killed = embedder.submit(config, head.url)
    command = [sys.executable, "-m", "embedder", "submit", str(second_path), "--address", head.url, "--follow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as follower:
        until(lambda: list(store.glob("runs/*/run.json")), f"run: {killed.log()}")
        refused = embedder.submit(config, head.url)
        until(lambda: parts(second_store), "part of the second job")
        follower.terminate()
        _, output = follower.communicate(timeout=120)
    last = output.strip().splitlines()[-1]
    assert follower.returncode == 128 + 15 and "no longer following; job refresh-" in last, output
    second_id = last.partition("job ")[2].partition(" ")[0]
    assert server.job(second_id).status == "RUNNING"
    assert ended(refused).exit_code == 2 and "another run is writing to it" in refused.log(), refused.log()

    until(lambda: parts(store), f"part: {killed.log()}")
    for driver in head.drivers(killed.job_id):
        driver.kill()
    info = ended(killed)
    assert info.status == "FAILED" and info.exit_code not in (None, 0)
    with pytest.raises(RunFailedError, match=f"job {killed.job_id} failed with exit code"):
        list(killed.follow())

    num_parts = len(parts(store))
    stopped = embedder.submit(config, head.url)
    until(lambda: len(parts(store)) > num_parts + 1, f"part: {stopped.log()}")
    assert stopped.stop()
    assert ended(stopped).status == "STOPPED"
    assert "items, kept and not yet published" in stopped.log(), "it stopped as by Ctrl-C, and wasn't killed"
    with pytest.raises(RunFailedError, match="was stopped; what is finished is kept"):
        list(stopped.follow())
    assert not stopped.stop(), "it doesn't run any more"

    last = embedder.submit(config, head.url)
    output = "".join(last.follow())
    assert last.info().status == "SUCCEEDED" and "finished before" in output, output
    until(lambda: server.job(second_id).is_over, "end of the second job")
    assert server.job(second_id).status == "SUCCEEDED", server.log(second_id)
    check_rows(store, path)
    check_rows(second_store, second_path)


def test_wrong_addresses_and_tokens_are_refused(head, write_config, monkeypatch):
    path, store = write_config("token", 2)
    for port in (ray_head.free_port(), head.port):  # nothing; Ray's own, which says no HTTP
        code, _, output = run_here("submit", path, "--address", f"http://127.0.0.1:{port}")
        assert code == 2 and f"127.0.0.1:{port}: it can't be reached" in output, output
        assert len(output.strip().splitlines()) == 1, output
    for token, found in (("0" * 32, "it wants another token (403)"), ("", "it wants a token (401)")):
        monkeypatch.setenv("RAY_AUTH_TOKEN", token)
        monkeypatch.setenv("HOME", "/nonexistent")
        code, _, output = run_here("submit", path, "--address", head.url)
        assert code == 2 and found in output and len(output.strip().splitlines()) == 1, output
    assert not store.exists()


def test_a_head_that_dies_is_reported_in_one_line_to_who_follows_a_job(head):
    """Comes last: the cluster is gone then."""
    job_id = JobServer(head.url).submit({"submission_id": "long", "entrypoint": "echo begun; sleep 600"})
    command = [sys.executable, "-m", "embedder", "jobs", "logs", job_id, "--follow", "--address", head.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline()
        head.kill()
        _, output = process.communicate(timeout=240)
    assert process.returncode == 1
    (line,) = output.strip().splitlines()
    assert "the cluster's head has not answered any more" in line and "the same submission continues later" in line
