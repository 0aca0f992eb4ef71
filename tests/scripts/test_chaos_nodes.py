"""The chaos script for nodes: a run on a cluster ends by itself, and has every row once, though a node is lost."""

import json
import os
import shutil

import pytest
from script_runs import last_json, run_script

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "nsenter"))),
    reason="namespaces need root, and ip, unshare and nsenter",
)


@needs_root
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_survives_the_node_of_a_stages_only_replica(starts_ray, tmp_path):
    """One round; the others of the script take a quarter of an hour."""
    state = tmp_path / "rounds.jsonl"
    words = ["--rounds", 1, "--only", "kill-only", "--images", 300, "--state", state, "--name", f"test{os.getpid()}-"]
    done = run_script("chaos_nodes.py", *words, timeout_s=800)
    found = last_json(done)
    assert (found["faults"], done.returncode) == ([], 0), done.stdout + done.stderr
    assert found["kinds"]["kill-only"]["rows_compared"] >= 300
    assert (found["effects"] > 50, found["deviations"]) == (True, 0)
    (outcome,) = map(json.loads, state.read_text().splitlines())
    assert outcome["code"] == 0
    assert "killed" in outcome["what"]
    assert any("lost" in event for event in outcome["events"])

    again = run_script("chaos_nodes.py", *words, timeout_s=60)
    assert last_json(again) == found, "finished rounds are read from the state file"
    assert len(state.read_text().splitlines()) == 1


@pytest.mark.medium
def test_a_kind_that_is_not_there_is_refused():
    done = run_script("chaos_nodes.py", "--only", "kil", timeout_s=60)
    assert done.returncode == 2
    assert "no such kind: kil; there are kill, kill-only" in done.stderr
