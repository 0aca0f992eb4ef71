"""A run that loses a node, on a Ray of three nodes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import samples
from embedding_runs import assert_same, embedded

import embedder

PROGRAM = Path(__file__).parents[2] / "support" / "lost_node_run.py"

pytestmark = [pytest.mark.slow(rotates=True), pytest.mark.usefixtures("starts_ray")]


def test_a_node_that_is_killed_under_a_stage_with_work_costs_neither_a_row_nor_the_run(make_run, tmp_path, tiny_model):
    source = samples.folder(tmp_path / "in", num_images=60, num_clips=1)
    _, local = embedded(make_run(source, store=str(tmp_path / "local")))
    store = tmp_path / "ray"
    options = ["--set", "decode.items_per_task=4", "--set", "rows_per_part=8", "--stages", "2", "--engine", "ray"]
    command = [sys.executable, PROGRAM, tmp_path / "notes", "embed", source, "--model", tiny_model, "--store", store]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=220, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    ended = json.loads(done.stdout.splitlines()[-1])
    assert ended["code"] == 0, ended["stderr"]
    assert len(ended["nodes"]) == 2, "the stage went on elsewhere"
    rows = embedder.open_store(store).to_arrow().to_pylist()
    found = {(row["item_id"], row["segment"]): row for row in rows}
    assert len(found) == len(rows)
    assert_same(found, local)
