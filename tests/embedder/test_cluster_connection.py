"""Attaching to a cluster of machines of their own, what is refused there, and the loss of its head."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import samples

from cluster.nodes import NodeCluster
from embedder.compat import ray_gcs

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "embedder" / "demo_model"
COMMAND = (sys.executable, "-m", "embedder", "embed")
OPTIONS = ("--model", str(MODEL), "--set", "num_stages=1", "--set", "decode.num_cpus=0.3")
GIVES_UP_SOON = """
import sys
from embedder import cli
from embedder.executors import head_watch
head_watch.LOST_AFTER_S = 15
sys.argv[0] = "embedder"
cli.main()
"""
LEAVES_A_MARK = "\nimport pathlib, socket\npathlib.Path({folder!r}, socket.gethostname()).touch()\n"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "nsenter"))),
        reason="namespaces need root, and ip, unshare and nsenter",
    ),
]


@pytest.fixture(scope="module")
def private(tmp_path_factory):
    return tmp_path_factory.mktemp("private")


@pytest.fixture(scope="module")
def cluster(starts_ray, private):
    """Two nodes of one CPU, each with a disk of its own."""
    cluster = NodeCluster(f"link{os.getpid()}-")
    cluster.start(2, 1, private=[str(private)])
    yield cluster
    cluster.stop()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return samples.folder(tmp_path_factory.mktemp("source"), num_images=12)


def ended(command):
    """Exit code of a command, and what it wrote on standard error."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stderr


def embed(cluster, number, source, store, *, folder=ROOT, **variables):
    """Command line on a node, in a folder whose packages Python takes."""
    words = (*COMMAND, str(source), "--store", str(store), "--ray-address", cluster.address, *OPTIONS)
    variables = (f"{name}={value}" for name, value in variables.items())
    return cluster.command(number, ["env", "-C", str(folder), *variables, *words])


def test_a_store_on_disks_of_their_own_is_refused_and_nothing_is_left(cluster, private, source):
    code, output = ended(embed(cluster, 0, source, private / "store"))
    assert code == 2, output
    *_, head, row, line = output.splitlines()
    assert head.split() == ["node", "what", "found", "cure"]
    assert row.startswith(f"{cluster.netns(1)} {cluster.ip(1)}  store  ")
    assert line.startswith(f"embedder: cluster {cluster.address}: 1 of 2 nodes can't take part in this run")
    for number in (0, 1):
        assert subprocess.check_output(cluster.command(number, ["ls", "-A", str(private)])) == b""


def test_a_wrong_token_and_a_machine_that_is_no_node_are_told(cluster, source, tmp_path):
    token = "0123456789abcdef0123456789abcdef"
    code, output = ended(embed(cluster, 0, source, tmp_path / "store", RAY_AUTH_TOKEN=token))
    assert code == 2 and "the cluster wants another token" in output.splitlines()[-1], output

    command = embed(cluster, 0, source, tmp_path / "store")
    elsewhere = ["ip", "netns", "exec", cluster.netns(1), "unshare", "-m", "-p", "--fork", "--mount-proc"]
    code, output = ended([*elsewhere, *command[command.index("env") :]])
    assert code == 2 and "this machine is no node of the cluster" in output.splitlines()[-1], output
    assert not (tmp_path / "store").exists()


def test_a_node_with_other_code_is_sent_the_drivers(cluster, private, source, tmp_path):
    marks = tmp_path / "marks"
    marks.mkdir()
    code_folder = tmp_path / "code"
    for package in ("embedder", "shards", "index"):
        shutil.copytree(
            ROOT / package,
            code_folder / package,
            ignore=shutil.ignore_patterns("demo_data", "demo_model", "__pycache__"),
        )
    with (code_folder / "embedder" / "__init__.py").open("a") as file:
        file.write(LEAVES_A_MARK.format(folder=str(marks)))
    subprocess.check_call(cluster.command(0, ["cp", "-r", f"{code_folder}/.", str(private)]))
    code, output = ended(embed(cluster, 0, source, tmp_path / "store", folder=private))
    assert code == 0, output
    assert "this package is sent to nodes" in output
    assert {path.name for path in marks.iterdir()} == {cluster.netns(0), cluster.netns(1)}


def test_the_loss_of_the_head_is_told_recorded_and_ends_the_command(cluster, tmp_path):
    """Comes last: the cluster is gone then."""
    source, store = samples.folder(tmp_path / "source", num_images=1000, captions=False), tmp_path / "store"
    command = embed(cluster, 1, source, store)
    at = command.index("embed")
    command[at - 2 : at] = ["-c", GIVES_UP_SOON]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        while not any(store.rglob("*.parquet")):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.5)
        cluster.cut(0)
        _, output = process.communicate(timeout=150)
    assert process.returncode == 1
    line = f"embedder: the head of the cluster, {cluster.address}, has not answered for 15 s, and a cluster can't work"
    assert output.splitlines()[-1].startswith(line)
    record = json.loads((store / "runs.jsonl").read_text().splitlines()[-1])
    assert record["exit_code"] == 1 and "the same command continues" in record["message"]


def test_a_node_that_the_head_does_not_list_yet_is_waited_for_and_another_clusters_is_not(monkeypatch):
    asked = []

    class Head:
        def get_all_node_info(self, timeout):
            asked.append(timeout)
            return {bytes.fromhex("ab"): None} if len(asked) > 2 else {}

    assert ray_gcs._is_node(Head(), lambda: {"ab"})
    assert len(asked) == 3
    assert not ray_gcs._is_node(Head(), set), "no node at all here: nothing to wait for"
    assert len(asked) == 3
    monkeypatch.setattr(ray_gcs, "REGISTERED_S", 0.1)
    assert not ray_gcs._is_node(Head(), lambda: {"cd"})
