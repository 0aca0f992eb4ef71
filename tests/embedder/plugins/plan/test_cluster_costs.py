"""`embedder plan --cluster` on several nodes on loopback, whose labels name their types."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_runs import run_apart

from shards.plan import ShardPlan

SCRIPT = Path(__file__).parents[4] / "scripts" / "cluster" / "loopback.py"
MEASURING = "measuring on "


@pytest.fixture
def address(starts_ray, monkeypatch):
    """A head without CPUs, two nodes of one label, one of another, one with GPUs that are none."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    nodes = ["0:0", "1:0:type=small", "1:0:type=small", "2:0:type=large", "1:1:type=T4"]
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), *nodes], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ
    ) as process:
        yield process.stdout.readline().strip()
        process.stdin.close()
        process.wait(timeout=60)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_each_type_of_node_is_measured_once_and_stages_are_placed_on_them(address, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out = tmp_path / "plan.json"
    command = ["plan", "--model", tiny_model, "--cluster", "--ray-address", address, "--set", "cluster.type_label=type"]
    refused = run_apart(*command, timeout_s=200)
    assert (refused.code, refused.stderr.count(MEASURING)) == (2, 1)  # the first in the order of their names
    assert "T4" in refused.stderr.splitlines()[-1]
    assert "torch finds none" in refused.stderr.splitlines()[-1]
    command += ["--stages", 2, "--set", "device=cpu", "--out", out, "--json"]
    first = run_apart(*command, timeout_s=200)
    assert first.code == 0, first.stderr
    again = run_apart(*command, timeout_s=200)
    assert (first.stderr.count(MEASURING), again.stderr.count(MEASURING)) == (2, 0)
    assert first.found == again.found
    assert [line.partition(": ")[0] for line in first.found["node_types"]] == ["large", "small"]
    assert "small: 2 nodes, " in first.found["node_types"][1]
    plan = ShardPlan.from_json(out.read_text())
    assert plan.costs == "measured"
    assert {stage.device for stage in plan.stages} <= {"small", "large"}
    assert all((stage.num_gpus, stage.num_threads) == (0, 1) for stage in plan.stages)
    measured = [json.loads(path.read_text()) for path in (tmp_path / "cache").rglob("TypeCosts-*.json")]
    assert len(measured) == 2
    assert all(each["costs"]["vision"]["layer_s"] > 0 for each in measured)
