"""Two jobs on one cluster: the second waits for what the first one holds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import samples

import embedder

SCRIPT = Path(__file__).parents[3] / "scripts" / "cluster" / "loopback.py"

ON_ALL_GPUS = ("--set", "stage=[{num_gpus = 1}, {num_gpus = 1}]")
HOLDER = """
import sys

import ray

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
actors = [ray.remote(num_gpus=1, num_cpus=0)(type("Holder", (), {"ready": lambda self: 1})).remote() for _ in range(2)]
ray.get([actor.ready.remote() for actor in actors])
print("held", flush=True)
sys.stdin.read()
"""

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("starts_ray")]


@pytest.fixture(scope="module")
def two_nodes():
    """Address of a cluster of two nodes with two logical CPUs each, which the tests have one after the other."""
    environment = os.environ | {"RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, str(SCRIPT), "2:2", "2:2"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, env=environment) as cluster:
        yield cluster.stdout.readline().strip()
        cluster.communicate("quit\n", timeout=60)


def start(address, source, model, store, *options):
    """Begin a run on the cluster."""
    command = [sys.executable, "-m", "embedder", "embed", source, "--model", model, "--store", store, "--json"]
    command += ["--ray-address", address, "--stages", 2, "--device", "cpu", *options]
    environment = os.environ | {"RAY_AUTH_MODE": "disabled"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([str(word) for word in command], **pipes, text=True, env=environment)


def ended(job):
    """Wait for a run; its report and its messages."""
    out, errors = job.communicate(timeout=300)
    assert job.returncode == 0, errors
    return json.loads(out.splitlines()[-1]), errors


def num_rows(store):
    return embedder.open_store(store).to_arrow().num_rows


def test_two_jobs_that_want_all_gpus_run_one_after_the_other(two_nodes, tiny_model, tmp_path):
    source = samples.folder(tmp_path / "in", num_images=30, num_clips=0)
    jobs = [start(two_nodes, source, tiny_model, tmp_path / name, *ON_ALL_GPUS) for name in ("first", "second")]
    reports = [ended(job)[0] for job in jobs]
    assert [num_rows(tmp_path / name) for name in ("first", "second")] == [30, 30]
    assert all([place["num_gpus"] for place in report["places"]] == [1, 1] for report in reports)
    starts = [[load["started_s"] for load in report["loads"]] for report in reports]
    assert max(starts[0]) < min(starts[1]) or max(starts[1]) < min(starts[0]), "none of one between those of the other"


def test_a_job_waits_for_what_another_holds_but_no_longer_than_it_may(two_nodes, tiny_model, tmp_path):
    source = samples.folder(tmp_path / "in", num_images=10, num_clips=0)
    holder = [sys.executable, "-c", HOLDER, two_nodes]
    environment = os.environ | {"RAY_AUTH_MODE": "disabled"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(holder, **pipes, text=True, env=environment) as other:
        assert other.stdout.readline().strip() == "held"
        limit = ("--set", "cluster.wait_s=1")
        impatient = start(two_nodes, source, tiny_model, tmp_path / "impatient", *ON_ALL_GPUS, *limit)
        _, errors = impatient.communicate(timeout=120)
        assert impatient.returncode == 1
        assert "cluster: no room for 4 x GPU and " in errors and "Traceback" not in errors
        assert not (tmp_path / "impatient" / "CURRENT.json").exists()
        patient = start(two_nodes, source, tiny_model, tmp_path / "patient", *ON_ALL_GPUS)
        seen = iter(patient.stderr.readline, "")
        assert any(line.startswith("waiting for 4 x GPU and ") for line in seen), "reported before it gets them"
        other.communicate("", timeout=60)
    ended(patient)
    assert num_rows(tmp_path / "patient") == 10
