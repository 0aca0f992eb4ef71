"""Several people's trained layers live next to one base, and each makes exactly the model that was trained."""

from pathlib import Path

import pytest
import train_samples
from safetensors.torch import load_file
from train_samples import training, weights

from embedder.plugins.train.train_command import train_parts
from embedder.plugins.train.train_run import train

WHO = {"anna": {"vision_layers": [3, 4], "seed": 1}, "ben": {"text_layers": [0, 4], "seed": 2}}


@pytest.fixture(scope="module")
def deltas(tiny_model, tmp_path_factory):
    """Reports of two people who trained different layers over one base."""
    folder = tmp_path_factory.mktemp("deltas")
    source = train_samples.table(folder / "pairs.parquet")
    return {
        name: train(
            training(source, folder / name, model=str(tiny_model), train={"what": "layers", "num_steps": 4} | layers)
        )
        for name, layers in WHO.items()
    }


def content(folder):
    return {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in folder.iterdir()}


def test_each_delta_over_the_untouched_base_gives_the_trained_weights(tiny_model, deltas, tmp_path, run_embedder):
    before = content(tiny_model)
    for name, report in deltas.items():
        code, made, stderr = run_embedder(
            "model", "apply-delta", tiny_model, report.delta, "--out", tmp_path / f"{name}-model", "--json"
        )
        assert code == 0, stderr
        assert made["out"] == str(tmp_path / f"{name}-model")
        assert weights(tmp_path / f"{name}-model") == weights(Path(report.delta).parent / "last")
        code, info, stderr = run_embedder("model", "info", tmp_path / f"{name}-model", "--json")
        assert (code, info["config"]["name"], info["config"]["trained"]) == (0, name, True), stderr
        assert info["fingerprints"]["model"] == made["model_fingerprint"]
    assert content(tiny_model) == before
    held = [set(load_file(f"{report.delta}/model.safetensors")) for report in deltas.values()]
    assert held[0] & held[1] == {"logit_scale"}


def test_a_delta_says_what_it_is_and_what_to_do_with_it(tiny_model, deltas, tmp_path, run_embedder):
    delta = deltas["anna"].delta
    code, base, _ = run_embedder("model", "info", tiny_model, "--json")
    code, info, stderr = run_embedder("model", "info", delta, "--json")
    assert code == 0, stderr
    assert (info["kind"], info["name"]) == ("delta", "anna")
    assert info["base_fingerprint"] == base["fingerprints"]["model"]
    assert set(info["parameters"]) == {"vision layer 3", "logit_scale"}
    assert info["num_parameters"] == sum(each.numel() for each in load_file(f"{delta}/model.safetensors").values())
    code, _, stderr = run_embedder("plan", "--model", delta)
    assert code == 2
    assert "this is a delta; make a model of it with `embedder model apply-delta BASE" in stderr
    said = "\n".join(map(str, train_parts(deltas["anna"])))
    assert f"embedder model apply-delta {tiny_model} {delta} --out DIR" in said


def test_a_delta_over_another_base_or_onto_something_is_refused(tiny_model, deltas, tmp_path, run_embedder):
    anna, ben = (report.delta for report in deltas.values())
    other = Path(anna).parent / "last"
    code, _, stderr = run_embedder("model", "apply-delta", other, ben, "--out", tmp_path / "both")
    assert (code, (tmp_path / "both").exists()) == (2, False)
    assert "name the right base" in stderr
    code, _, stderr = run_embedder("model", "apply-delta", tiny_model, anna, "--out", tiny_model)
    assert code == 2
    assert "there is something already" in stderr
    code, _, stderr = run_embedder("model", "apply-delta", tiny_model, tiny_model, "--out", tmp_path / "none")
    assert code == 2
    assert "name a delta" in stderr
