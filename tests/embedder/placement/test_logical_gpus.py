"""Real runs where Ray counts GPUs, in a Ray of their own: GPUs by name only, and stages that compute on CPUs."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import samples
import torch
from embedding_runs import embedded

import embedder
from embedder.config import load_config
from embedder.encoders.query_encoder import QueryEncoder
from embedder.models.model_folder import open_model
from embedder.placement.fleet import Available
from embedder.placement.resources import allocate
from shards.model_config import load_model_config
from shards.plan import plan_shards

PROGRAM = Path(__file__).parents[2] / "support" / "logical_gpu_run.py"

pytestmark = pytest.mark.usefixtures("starts_ray")


@pytest.fixture
def on_logical_gpus(tmp_path):
    """Does runs in a process with a Ray that counts so many GPUs or nodes; gives results, and notes of the steps."""

    def run(num_gpus, *runs, nodes=()):
        notes = tmp_path / "notes"
        notes.mkdir()
        request = tmp_path / "request.json"
        request.write_text(json.dumps({"num_gpus": num_gpus, "nodes": nodes, "notes": str(notes), "runs": runs}))
        command = [sys.executable, str(PROGRAM), str(request)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1]), [json.loads(path.read_text()) for path in notes.glob("*.json")]

    return run


def shared_out(num_gpus, num_stages):
    """Stages with the shares that a run would give them on so many GPUs."""
    stages = allocate(load_config(overrides={"num_stages": num_stages}).compute, Available(4, num_gpus)).stages
    return [stage.num_gpus for stage in stages]


def command(source, model, store, *options, replicas=1):
    """A run on Ray whose blocks hold few items, and which has so many replicas of each stage."""
    arguments = ["embed", source, "--model", model, "--store", store, "--engine", "ray", "--json"]
    arguments += ["--set", "decode.items_per_task=5", *options]
    return ["command", [str(argument) for argument in arguments], replicas]


def on_cpus(shares):
    """Options that reserve shares of GPUs, and compute on CPUs."""
    stages = ", ".join(f"{{num_gpus = {share}, num_threads = 1}}" for share in shares)
    return "--device", "cpu", "--set", f"stage=[{stages}]", "--stages", len(shares)


def assert_same_vectors(store, local):
    rows = embedder.open_store(store).to_arrow().to_pylist()
    found = {(row["item_id"], row["segment"]): row for row in rows}
    assert found.keys() == local.keys() and len(rows) == len(local)
    for key, row in local.items():
        for name in ("image_embedding", "text_embedding"):
            assert (row[name] is None) == (found[key][name] is None)
            assert row[name] is None or np.allclose(row[name], found[key][name], atol=1e-6)


def assert_blocks_stayed_whole(notes, num_stages):
    """Each stage was handed the very tables that decoding made."""
    handed = {
        step: sorted(note["rows"] for note in notes if note.get("step") == step and note.get("rows"))
        for step in ("decode", *range(num_stages))
    }
    assert len(handed["decode"]) > 3 and len({len(rows) for rows in handed["decode"]}) > 1, (
        "several, and of several sizes"
    )
    for index in range(num_stages):
        assert handed[index] == handed["decode"]


def gpus_of(notes, run=0):
    """The GPUs of each process of a stage in one of the runs."""
    return sorted((note["step"], note["gpus"]) for note in notes if note.get("run") == run)


@pytest.mark.slow
def test_on_two_gpus_three_stages_embed_as_one_process_does_and_a_predictor_of_one_stage_uses_both(
    make_run, tiny_model, tmp_path, on_logical_gpus
):
    source = samples.folder(tmp_path / "in", num_images=16, num_clips=2)
    _, local = embedded(make_run(source, store=str(tmp_path / "local")))
    shares = shared_out(2, 3)
    run = command(source, tiny_model, tmp_path / "store", *on_cpus(shares))
    pictures = [(path, caption_of(number)) for number, path in enumerate(picture_files(tmp_path))]
    assert shared_out(2, 1) == [1]
    options = {"num_stages": 1, "stage": [{"num_gpus": 1, "device": "cpu", "num_threads": 1}]}
    prediction = ["predict", {"rows": pictures, "model": str(tiny_model), "options": options}, 2]
    (ended, found), notes = on_logical_gpus(2, run, prediction)
    assert ended["code"] == 0, ended["stderr"]
    assert_same_vectors(tmp_path / "store", local)
    assert_blocks_stayed_whole(notes, 3)
    (_, first), (_, second), (_, third) = gpus_of(notes)
    assert second == third and first != second, "the first one by itself, the others together"
    report = json.loads(ended["stdout"].splitlines()[-1])
    assert [(place["device"], place["num_gpus"]) for place in report["places"]] == [("cpu", each) for each in shares]
    assert "2 GPUs: stage 0 on cpu (1 GPU), stage 1 on cpu (0.5 GPU)" in ended["stderr"]

    assert gpus_of(notes, run=1) == [(0, [0]), (0, [1])], "on all GPUs, a GPU each"
    encoder = QueryEncoder(open_model(str(tiny_model)))
    images = encoder.encode_image([Path(path).read_bytes() for path, _ in pictures])
    texts = encoder.encode_text([caption for _, caption in pictures])
    assert np.allclose(found["image_embedding"], images, atol=1e-6)
    assert np.allclose(found["text_embedding"], texts, atol=1e-6)


def caption_of(number):
    return samples.SENTENCES[number % len(samples.SENTENCES)]


def picture_files(folder):
    paths = [folder / f"{seed}.png" for seed in range(10)]
    for seed, path in enumerate(paths):
        path.write_bytes(samples.image_bytes(seed))
    return list(map(str, paths))


@pytest.mark.slow
def test_three_stages_share_one_gpu_and_one_without_a_driver_is_told_in_a_line(
    make_run, tiny_model, tmp_path, on_logical_gpus
):
    source = samples.folder(tmp_path / "in", num_images=16, num_clips=1)
    _, local = embedded(make_run(source, store=str(tmp_path / "local")))
    runs = [
        command(source, tiny_model, tmp_path / "store", *on_cpus(shared_out(1, 3))),
        command(source, tiny_model, tmp_path / "other"),
    ]
    (ended, without_driver), notes = on_logical_gpus(1, *runs)
    assert ended["code"] == 0, ended["stderr"]
    assert_same_vectors(tmp_path / "store", local)
    assert {tuple(gpus) for _, gpus in gpus_of(notes)} == {(0,)}
    if torch.cuda.is_available():
        return
    assert without_driver["code"] == 2
    *_, line = without_driver["stderr"].strip().splitlines()
    assert line.startswith("embedder: stage 0 on node ") and 'device "cuda", and torch' in line
    assert line.endswith('write device = "cpu"')
    assert "Traceback" not in without_driver["stderr"] and len(without_driver["stderr"].splitlines()) < 10
    assert not (tmp_path / "other" / "CURRENT.json").exists()


@pytest.mark.slow
def test_stages_land_on_the_types_of_the_plan_and_use_the_whole_fleet(make_run, tiny_model, tmp_path, on_logical_gpus):
    source = samples.folder(tmp_path / "in", num_images=24, num_clips=2)
    _, local = embedded(make_run(source, store=str(tmp_path / "local")))
    plan = plan_shards(load_model_config(tiny_model), 2)
    types = ("T4", "L4")
    pairs = zip(plan.stages, types, strict=True)
    stages = [replace(stage, device=each, num_replicas=2, num_gpus=1.0) for stage, each in pairs]
    (tmp_path / "plan.json").write_text(replace(plan, stages=tuple(stages)).to_json())
    nodes = [{"num_cpus": 1}, *({"num_cpus": 2, "num_gpus": 2, "labels": {"type": each}} for each in ("L4", "T4"))]
    options = ["--stages", 2, "--plan", tmp_path / "plan.json", "--set", "cluster.type_label=type"]
    on_types = ["--device", "cpu", "--set", "stage=[{num_gpus = 1}, {num_gpus = 1}]"]
    on_all = ["--device", "cpu", "--stages", 1]
    runs = [
        command(source, tiny_model, tmp_path / "typed", *options, *on_types, replicas=2),
        command(source, tiny_model, tmp_path / "whole", *on_all, replicas=3),
    ]
    (typed, whole), notes = on_logical_gpus(0, *runs, nodes=nodes)
    assert (typed["code"], whole["code"]) == (0, 0), typed["stderr"] + whole["stderr"]
    for store in ("typed", "whole"):
        assert_same_vectors(tmp_path / store, local)
    type_of = {note["node"]: note["type"] for note in notes if "type" in note}
    places = [(note["step"], type_of[note["node"]], note["gpus"]) for note in notes if "gpus" in note]
    on_gpus = sorted((step, kind) for step, kind, gpus in places if gpus)
    assert on_gpus == [(0, "T4"), (0, "T4"), (1, "L4"), (1, "L4")]
    on_cpus_alone = sorted((step, str(kind)) for step, kind, gpus in places if not gpus)
    assert on_cpus_alone == [(0, kind) for kind in ("L4", "None", "T4")], "on every node"
