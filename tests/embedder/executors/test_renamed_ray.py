"""A run on a Ray that has renamed what `embedder.compat` reaches into of Ray Data."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import samples
from embedding_runs import assert_same, embedded

import embedder

SUPPORT = Path(__file__).parents[2] / "support"
ROOT = Path(embedder.__file__).parents[1]


@pytest.mark.slow
@pytest.mark.usefixtures("starts_ray")
def test_a_run_ends_with_the_same_rows_where_ray_has_renamed_its_internals(make_run, tiny_model, tmp_path):
    source = samples.folder(tmp_path / "in", num_images=40)
    _, expected = embedded(make_run(source, store=str(tmp_path / "local")))
    shares = ", ".join(f"{{num_gpus = {share}, num_threads = 1}}" for share in (1, 0.5, 0.5))
    stages = f"stage=[{shares}]"
    options = ["--engine", "ray", "--device", "cpu", "--json", "--set", stages, "--set", "decode.items_per_task=5"]
    options += ["--set", "batch_size=4"]
    command = ["embed", source, "--model", tiny_model, "--store", tmp_path / "store", *options]
    (tmp_path / "notes").mkdir()
    request = {
        "num_gpus": 2,
        "nodes": [],
        "notes": str(tmp_path / "notes"),
        "runs": [["command", [str(each) for each in command], 1]],
    }
    (tmp_path / "request.json").write_text(json.dumps(request))
    path = os.pathsep.join(str(each) for each in (SUPPORT / "renamed_ray", ROOT))
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "logical_gpu_run.py"), str(tmp_path / "request.json")],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (ended,) = json.loads(done.stdout.splitlines()[-1])
    assert ended["code"] == 0, ended["stderr"]
    rows = embedder.open_store(tmp_path / "store").to_arrow().to_pylist()
    assert_same({(row["item_id"], row["segment"]): row for row in rows}, expected)
    said = ended["stderr"]
    for loss in ("are copied together", "waits for Ray", "shows no operators"):
        assert said.count(loss) == 1, said
