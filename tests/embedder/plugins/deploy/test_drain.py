"""The hook before a pod stops: runs are asked to stop and waited for, and the node leaves its cluster.

Each test has a process namespace of its own, as a pod does: elsewhere it would stop the runs of the whole machine.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from embedder.plugins.deploy.drain import is_job, option

NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
HAS_NAMESPACES = subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode == 0
needs_namespaces = pytest.mark.skipif(not HAS_NAMESPACES, reason="no right to make a process namespace (unshare --pid)")
RUN = """
import pathlib, signal, sys, time
name = sys.argv[1] + "-" + sys.argv[2]
def stop(*_):
    time.sleep(float(sys.argv[2]))
    pathlib.Path(__file__).with_name(name).touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
pathlib.Path(__file__).with_name(name + ".ready").touch()
time.sleep(60)
"""
POD = """
import json, pathlib, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
runs = [["refresh", "1"], ["search", "1"], ["embed", "50"]]
processes = [subprocess.Popen([sys.executable, folder / "embedder", *words]) for words in runs]
while len(list(folder.glob("*.ready"))) < 3:
    time.sleep(0.05)
drain = [sys.executable, "-m", "embedder", "deploy", "drain", "--within-s", "3", "--json"]
done = subprocess.run(drain, capture_output=True, text=True, check=True).stdout
print(json.dumps([json.loads(done)["done"], processes[2].pid, [process.poll() for process in processes]]))
"""
CLUSTER = """
set -e
ray start --head --port={port} --num-cpus=0 --temp-dir={folder} --include-dashboard=false >/dev/null
ray start --address=127.0.0.1:{port} --num-cpus=1 >/dev/null
{python} -m embedder deploy drain --within-s 60
{python} -c 'import ray
ray.init("127.0.0.1:{port}", log_to_driver=False, logging_level="ERROR")
print(sorted(node["Alive"] for node in ray.nodes()))'
"""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["embedder", "refresh", "run.toml"], True),
        (["/usr/bin/python3", "/opt/embedder/bin/embedder", "embed"], True),
        (["python", "-m", "embedder", "train"], True),
        (["python", "-m", "embedder", "serve"], False),
        (["python", "-m", "embedder", "deploy", "drain"], False),
        (["grep", "-r", "x", "embedder", "embed"], False),
        (["embedder"], False),
        ([], False),
    ],
)
def test_runs_are_told_from_other_processes(words, expected):
    assert is_job(words) is expected


def test_an_option_is_read_from_the_words_of_a_process():
    words = ["raylet", "--node_id=ab12", "--gcs-address=10.0.0.1:6379"]
    assert option(words, "node_id") == "ab12"
    assert option(words, "gcs-address") == "10.0.0.1:6379"
    assert option(words, "node") is None


@pytest.mark.medium
@needs_namespaces
def test_runs_are_asked_to_stop_and_waited_for_and_nothing_else_is(tmp_path):
    (tmp_path / "embedder").write_text(RUN)
    done = subprocess.run([*NAMESPACE, sys.executable, "-c", POD, tmp_path], capture_output=True, text=True, check=True)
    lines, slow_pid, codes = json.loads(done.stdout)
    assert lines == ["2 commands asked to stop", f"process {slow_pid} still runs"]
    assert codes == [143, None, None]
    assert (tmp_path / "refresh-1").exists()
    assert not (tmp_path / "search-1").exists()


@pytest.mark.medium
@needs_namespaces
def test_without_anything_to_stop_it_ends_at_once():
    command = [*NAMESPACE, sys.executable, "-m", "embedder", "deploy", "drain", "--within-s", "60"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "nothing runs here\n"


@pytest.mark.slow
@pytest.mark.timeout(700)
@needs_namespaces
@pytest.mark.usefixtures("starts_ray")
def test_a_worker_leaves_its_cluster_and_the_head_stays():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= {"RAY_AUTH_MODE": "disabled", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:  # a short path, for sockets
        script = CLUSTER.format(port=port, folder=folder, python=sys.executable)
        done = subprocess.run(
            [*NAMESPACE, "bash", "-c", script], capture_output=True, text=True, env=env, timeout=600, check=False
        )
    assert done.returncode == 0, done.stderr
    drained, alive = done.stdout.splitlines()[-2:]
    assert drained.startswith("node ")
    assert drained.endswith(" is drained")
    assert alive == "[False, True]"
