"""The command line: exit codes, one-line errors, JSON, and the whole way from a folder to a contact sheet."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import samples
import torch
from command_runs import run_here
from PIL import Image

from embedder import installation
from embedder.placement import hardware
from shards import compat


@pytest.fixture
def folder(tmp_path):
    return samples.folder(tmp_path / "in", num_images=12, num_clips=1)


def test_from_a_folder_to_a_contact_sheet(folder, tiny_model, tmp_path, run_embedder, run_embedder_apart):
    store = tmp_path / "store"
    code, report, stderr = run_embedder_apart("embed", folder, "--model", tiny_model, "--store", store, "--json")
    assert code == 0, stderr
    assert (report["num_items"], report["num_rejected"], report["published"]) == (13, 0, True)
    assert report["engine"] == "local"
    assert "in one process and" in report["engine_reason"]
    saved = json.loads((store / "runs" / report["run_id"] / "report.json").read_text())
    assert saved["num_items"] == 13

    code, status, _ = run_embedder("index", "status", "--store", store, "--json")
    assert (code, status["published"], len(status["versions"])) == (0, 1, 1), "it came with the publication"
    assert (status["versions"][0]["kind"], status["versions"][0]["num_vectors"]) == ("flat", 13)

    sheet = tmp_path / "hits.png"
    code, found, _ = run_embedder("search", "a red car", "--store", store, "-k", 13, "--sheet", sheet, "--json")
    assert code == 0
    assert len({hit["item_id"] for hit in found["hits"]}) == 13
    scores = [hit["score"] for hit in found["hits"]]
    assert scores == sorted(scores, reverse=True)
    video = next(hit for hit in found["hits"] if hit["modality"] == "video")
    assert video["start_s"] == 0.0
    with Image.open(sheet) as image:
        pixels = np.asarray(image)
    assert pixels.shape[2] == 3
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 100, "there are images on it"


MISTAKES = {
    "no model": (["embed", "{folder}", "--store", "{tmp}/s"], "no model: give --model"),
    "no source": (["embed", "--model", "{model}", "--store", "{tmp}/s"], "no source: give SOURCE"),
    "missing source": (["embed", "{tmp}/nowhere", "--model", "{model}", "--store", "{tmp}/s"], "check the path"),
    "missing model": (["embed", "{folder}", "--model", "{tmp}/nowhere", "--store", "{tmp}/s"], "nowhere"),
    "unknown key": (["doctor", "--set", "modle=x"], "modle"),
    "unknown dtype": (["doctor", "--set", "dtype=int7"], 'dtype = "int7"'),
    "no store": (["search", "x", "--store", "{tmp}/nowhere"], "embedder embed SOURCE"),
    "empty query": (["search", " ", "--store", "{tmp}/nowhere"], "no store.json"),
    "nothing to evaluate": (["evaluate", "--store", "{tmp}/nowhere"], "no store.json"),
    "unknown index": (["index", "build", "--kind", "magic", "--store", "{tmp}/s"], "write auto, flat, hnsw or ivf"),
    "missing plan": (
        ["embed", "{folder}", "--model", "{model}", "--store", "{tmp}/s", "--plan", "{tmp}/none"],
        "embedder plan --out",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_exit_2(mistake, folder, tiny_model, tmp_path, run_embedder):
    arguments, message = MISTAKES[mistake]
    places = {"folder": folder, "model": tiny_model, "tmp": tmp_path}
    code, _, stderr = run_embedder(*(argument.format(**places) for argument in arguments))
    assert code == 2
    assert message in stderr
    assert len(stderr.strip().splitlines()) == 1


@pytest.mark.medium
def test_a_process_of_its_own_ends_with_one_line_too(tmp_path, run_embedder_apart):
    code, _, stderr = run_embedder_apart("search", "x", "--store", tmp_path / "nowhere")
    assert code == 2
    assert len(stderr.strip().splitlines()) == 1


@pytest.mark.medium
def test_a_pinned_plan_is_what_runs(folder, tiny_model, tmp_path, run_embedder):
    plan = tmp_path / "plan.json"
    assert run_embedder("plan", "--model", tiny_model, "--stages", 2, "--estimate", "--out", plan)[0] == 0
    tree = json.loads(plan.read_text())
    tree["stages"][0]["spec"]["vision"]["stop"] = tree["stages"][1]["spec"]["vision"]["start"] = 3
    plan.write_text(json.dumps(tree))
    options = ["--model", tiny_model, "--store", tmp_path / "s", "--plan", plan, "--json"]
    code, report, stderr = run_embedder("embed", folder, *options)
    assert code == 0, stderr
    assert [stage["spec"]["vision"] for stage in report["plan"]] == [{"start": 0, "stop": 3}, {"start": 3, "stop": 4}]
    assert {step["step"] for step in report["steps"]} == {"decode", "stage 0", "stage 1", "write"}
    code, _, stderr = run_embedder("embed", folder, *options, "--dtype", "bfloat16")
    assert code == 2
    assert "made for float32, and the run computes in bfloat16" in stderr


def test_doctor_names_versions_and_what_would_be_chosen(run_embedder):
    code, found, _ = run_embedder("doctor", "--json")
    assert code == 0
    assert found["ray"].startswith("2.")
    assert "CPU" in found["stage 2 would take"]
    if not torch.cuda.is_available():
        assert found["gpus"] == "none" and found["stage 2 would take"].endswith("to compute on cpu")
        assert found["dtype"].startswith('float32 (dtype = "auto"): the stages compute on CPUs')
    assert run_embedder("doctor", "--json", "--set", "dtype=int8")[1]["dtype"].startswith("int8")


def test_doctor_says_which_package_is_too_old_or_missing_with_the_cure_and_fails(monkeypatch):
    installed = {"torch": "2.7.1", "psutil": None, "ray": "2.52.1.dev0"}
    look = installation.installed_version
    monkeypatch.setattr(installation, "installed_version", lambda name: installed.get(name, look(name)))
    ended = run_here("doctor", "--json")
    assert ended.code == 1 and "3 packages missing or too old" in ended.stderr
    assert sorted(ended.found["problems"]) == [
        "psutil is missing: embedder needs psutil>=6.0; pip install 'psutil>=6.0'",
        "ray 2.52.1.dev0: embedder[embed] needs ray>=2.52.1; pip install 'ray>=2.52.1'",
        "torch 2.7.1: embedder[embed] needs torch>=2.8; start from an image or a module with torch>=2.8, or in "
        "its own environment: pip install 'torch>=2.8'",
    ]


@pytest.mark.parametrize("vendors", ["2.9.0a0+50eac811a6.nv25.09", "2.8.0+rocm6.4", "2.11.0+cu130"])
def test_a_vendors_build_of_torch_is_new_enough(monkeypatch, vendors):
    look = installation.installed_version
    monkeypatch.setattr(installation, "installed_version", lambda name: vendors if name == "torch" else look(name))
    assert installation.unmet_requirements() == []


def test_doctor_lists_fallbacks_and_what_they_cost(run_embedder, monkeypatch):
    has_name = compat.has_name
    monkeypatch.setattr(compat, "has_name", lambda name: name != "torch:_int_mm" and has_name(name))
    monkeypatch.delattr(os, "memfd_create")
    code, found, _ = run_embedder("doctor", "--json")
    assert code == 0 and found["problems"] == []
    product, memory_files = found["fallbacks"]
    assert product.startswith("products of int8 matrices: off, as torch ")
    assert product.endswith("int8 layers compute in float64: the same values, ten times slower and more")
    assert memory_files.startswith("files in memory (memfd): not on this system; ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a usable GPU")
def test_doctor_says_why_gpus_of_the_driver_are_of_no_use(run_embedder, monkeypatch):
    monkeypatch.setattr(hardware, "num_gpus", lambda: 2)
    _, found, _ = run_embedder("doctor", "--json")
    assert re.match(r"2, and torch can't use them \(.+\): fix the driver, or write device = \"cpu\"", found["gpus"])
    assert "0.5 GPU" in found["stage 2 would take"] and found["stage 2 would take"].endswith("to compute on cuda")
    _, found, _ = run_embedder("doctor", "--json", "--set", "device=cpu")
    assert " 0 GPU" in found["stage 2 would take"] and found["stage 2 would take"].endswith("to compute on cpu")


@pytest.mark.medium
@pytest.mark.parametrize("words", [["config", "--json"], ["config", "none.toml"]])
def test_closed_standard_streams_change_no_exit_code(words):
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-m", "embedder"]
    done = subprocess.run([*closed, *words], timeout=120, check=False)
    assert done.returncode == (2 if "none.toml" in words else 0)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("words", [["config"], ["config", "--json"], ["--version"]])
def test_a_full_disk_behind_standard_output_is_told_in_a_line(words, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "embedder", *words]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    line = "embedder: standard output can't be written (No space left on device); what the command did is done\n"
    assert (done.returncode, done.stderr) == (1, line)


def test_a_user_without_a_home_has_the_one_of_containers(monkeypatch):
    def no_entry(uid):
        raise KeyError(f"uid not found: {uid}")

    monkeypatch.setenv("HOME", "")  # so that it is put back
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", no_entry)
    assert run_here("--version").code == 0
    assert os.environ["HOME"] == "/"
