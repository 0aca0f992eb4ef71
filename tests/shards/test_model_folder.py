"""Configuration, fingerprints and summaries of model folders."""

import json
import os
import resource
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from shards.fingerprint import model_fingerprint, preprocess_fingerprint
from shards.fresh import init_model
from shards.model_config import find_model_folder, load_model_config
from shards.model_errors import ModelError
from shards.model_summary import describe_model
from shards.saving import staged_folder, write_weights


def edit(folder, section=None, **changes):
    path = folder / "config.json"
    tree = json.loads(path.read_text())
    (tree[section] if section else tree).update(changes)
    path.write_text(json.dumps(tree))


@pytest.fixture
def model(make_config, make_model, tmp_path):
    return shutil.copytree(make_model(make_config()), tmp_path / "own")


def test_a_configuration_comes_back_as_it_was_written(make_config, make_model):
    config = make_config({"init_values": 1e-5}, {"num_hidden_groups": 2})
    assert load_model_config(make_model(config)) == config


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        (None, {"format_version": 2}, r"config.json: format_version.*found 2"),
        (None, {"colour": "red"}, "colour.*found 'red'"),
        ("vision", {"depth": 0}, r"vision.depth.*found 0"),
        ("vision", {"width": 33}, r"width \(33\) is no multiple of num_heads \(2\)"),
        ("vision", {"patch_size": 64}, r"patch_size \(64\) exceeds image_size \(32\)"),
        ("vision", {"class_token": False}, 'pool "token" needs class_token'),
        ("vision", {"pooler": "tanh", "pool": "avg"}, "a pooler works on the class token"),
        ("text", {"num_hidden_groups": 9}, r"num_hidden_groups \(9\) exceeds num_hidden_layers"),
        ("text", {"pad_token_id": 500}, "outside the vocabulary"),
        ("text", {"hidden_act": "mish"}, "text.hidden_act.*found 'mish'"),
        ("preprocess", {"image_size": 64}, r"preprocess.image_size \(64\) is not the vision tower's \(32\)"),
        ("preprocess", {"max_caption_tokens": 99}, r"\(99\) exceeds the 24 tokens"),
        ("preprocess", {"std": [0.0, 1.0, 1.0]}, "each must be positive"),
        ("preprocess", {"mean": [float("nan"), 0, 0]}, "finite number"),
    ],
)
def test_a_broken_configuration_names_key_rule_and_value(model, section, changes, message):
    edit(model, section, **changes)
    with pytest.raises(ModelError, match=message) as caught:
        load_model_config(model)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("{", "no valid JSON"),
        ("[]", "found list"),
        ("[" * 200_000, r"no valid JSON \(it is nested too deeply\); repair or fetch it again"),
    ],
)
def test_a_missing_or_garbled_configuration_is_refused(model, content, message):
    (model / "config.json").unlink()
    if content is not None:
        (model / "config.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        load_model_config(model)


@pytest.mark.parametrize("tree", [{"model_type": "albert"}, {"architecture": "vit_small_patch16_224"}])
def test_a_checkpoint_of_another_library_is_sent_to_the_import(tmp_path, tree):
    (tmp_path / "config.json").write_text(json.dumps(tree))
    with pytest.raises(ModelError, match="embedder model import SRC"):
        load_model_config(tmp_path)


def test_fingerprints_do_not_depend_on_how_weights_are_spread_over_files(make_config, make_model):
    config = make_config()
    fingerprint = model_fingerprint(make_model(config))
    assert fingerprint == model_fingerprint(make_model(config, max_file_bytes=20_000))
    assert len(fingerprint) == 16
    assert set(fingerprint) <= set("0123456789abcdef")


def test_fingerprints_see_one_changed_bit_even_in_a_file_hashed_before(model):
    before = model_fingerprint(model)
    path = model / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert model_fingerprint(model) != before


def test_fingerprints_see_names_dtypes_and_towers_but_not_names_of_models_or_preprocessing(model, tmp_path):
    before = model_fingerprint(model)
    edit(model, name="another", trained=True)
    edit(model, "preprocess", resize="pad", max_caption_tokens=10)
    assert model_fingerprint(model) == before
    edit(model, "vision", norm_eps=1e-5)
    assert model_fingerprint(model) != before
    edit(model, "vision", norm_eps=1e-6)
    assert model_fingerprint(model) == before
    tensors = load_file(model / "model.safetensors")
    first, second = "vision.blocks.0.norm1.bias", "vision.blocks.1.norm1.bias"
    tensors[first], tensors[second] = tensors[second], tensors[first]
    save_file(tensors, model / "model.safetensors")
    assert model_fingerprint(model) != before


def test_a_fingerprint_stays_the_same_over_versions(make_config, tmp_path):
    folder = init_model(make_config(), tmp_path / "m", seed=0)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(zeros, folder / "model.safetensors")
    # Written down once: if this changes, every published index and store would be refused.
    assert model_fingerprint(folder) == "151d8a0242f57252"


def test_preprocess_fingerprints_see_everything_before_the_model(make_config):
    preprocess = make_config().preprocess
    base = preprocess_fingerprint(preprocess, b"{}", 5.0, 4)
    others = [
        preprocess_fingerprint(preprocess.model_copy(update={"resize": "squash"}), b"{}", 5.0, 4),
        preprocess_fingerprint(preprocess.model_copy(update={"resampler": "torchvision"}), b"{}", 5.0, 4),
        preprocess_fingerprint(preprocess.model_copy(update={"max_caption_tokens": 9}), b"{}", 5.0, 4),
        preprocess_fingerprint(preprocess.model_copy(update={"std": (0.2, 0.3, 0.5)}), b"{}", 5.0, 4),
        preprocess_fingerprint(preprocess, b"{ }", 5.0, 4),
        preprocess_fingerprint(preprocess, b"{}", 5.5, 4),
        preprocess_fingerprint(preprocess, b"{}", 5.0, 5),
    ]
    assert len({base, *others}) == 8
    assert preprocess_fingerprint(preprocess, b"{}", 5, 4) == base


def test_a_summary_counts_parameters_and_bytes_of_each_part(make_config, make_model):
    config = make_config({"pooler": "tanh"})
    folder = make_model(config)
    tensors = load_file(folder / "model.safetensors")
    summary = describe_model(folder)
    assert summary.num_parameters == sum(tensor.numel() for tensor in tensors.values())
    assert summary.size_bytes == 4 * summary.num_parameters
    parts = {part.name: part.num_parameters for part in summary.parts}
    assert parts["vision head"] == 2 * 32 + 32 * 33 + 24 * 32
    assert parts["text front"] == (120 + 24 + 2 + 2) * 16 + 32 * 17
    assert summary.dtypes == ("F32",)
    assert summary.model_fingerprint == model_fingerprint(folder)
    assert len(summary.tokenizer_fingerprint) == 16
    parted = describe_model(make_model(config, max_file_bytes=20_000))
    assert parted.num_files > 2
    assert parted.parts == summary.parts
    assert parted.model_fingerprint == summary.model_fingerprint


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o002])
def test_files_of_a_model_folder_go_by_the_umask_like_any_other(make_config, tmp_path, umask):
    before = os.umask(umask)
    try:
        folder = init_model(make_config(), tmp_path / "model", seed=0)
        tensors = {f"t{number}": torch.ones(4) for number in range(3)}
        (tmp_path / "parts").mkdir()
        write_weights(tmp_path / "parts", tensors.items(), max_file_bytes=16)
    finally:
        os.umask(before)
    files = [*folder.iterdir(), *(tmp_path / "parts").iterdir()]
    assert len(files) == 2 + 4
    assert {file.stat().st_mode & 0o777 for file in files} == {0o666 & ~umask}


def test_a_model_folder_that_cannot_be_written_is_named_in_a_line_and_nothing_is_left(make_config, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match=r"/file/sub/m: can't be written \(Not a directory\); name another folder"):
        init_model(make_config(), tmp_path / "file" / "sub" / "m", seed=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, limits[1]))  # as a disk that is full
    try:
        with pytest.raises(ModelError, match=r"/m: can't be written \(File too large\); free some space"):
            init_model(make_config(), tmp_path / "m", seed=1)
        with pytest.raises(ModelError, match=r"/m: can't be written"), staged_folder(tmp_path / "m") as stage:
            write_weights(stage, [("name", torch.zeros(1 << 12))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_summary_refuses_weights_of_another_configuration(model):
    edit(model, "vision", mlp_ratio=3.0)
    with pytest.raises(ModelError, match=r"mlp.fc1.* has shape .*128.*expected .*96"):
        describe_model(model)


def test_a_tensor_that_ends_before_it_begins_is_a_broken_header(model):
    path = model / "model.safetensors"
    size = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + size])
    next(value for name, value in header.items() if name != "__metadata__")["data_offsets"].reverse()
    text = json.dumps(header, separators=(",", ":")).encode().ljust(size)
    path.write_bytes(path.read_bytes()[:8] + text + path.read_bytes()[8 + size :])
    with pytest.raises(ModelError, match="model.safetensors: broken safetensors header.*fetch it again"):
        model_fingerprint(model)


@pytest.mark.medium
def test_configuring_planning_hashing_and_summarising_import_nothing_heavy(make_config, make_model):
    code = """
import sys
import shards, shards.plan, shards.model_config, shards.activations, shards.convert, shards.model_summary
config = shards.load_model_config(sys.argv[1])
shards.plan_shards(config, 3).to_json()
shards.model_summary.describe_model(sys.argv[1])
shards.model_config.find_model_folder(sys.argv[1])
heavy = {"torch", "timm", "transformers", "ray", "faiss", "PIL", "av", "pyarrow", "huggingface_hub", "obstore"}
assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code, str(make_model(make_config()))], check=True, timeout=60)


def test_a_local_folder_is_used_as_it_is(model, monkeypatch):
    assert find_model_folder(model) == model
    monkeypatch.chdir(model.parent)
    assert find_model_folder("own").resolve() == model
    with pytest.raises(ModelError, match="this is a file"):
        find_model_folder(model / "config.json")


@pytest.mark.parametrize("path", ["nowhere", "/nowhere/at/all", "./a/b", "", "org/name", "s3://bucket/model"])
def test_a_folder_that_is_not_there_is_refused(path):
    with pytest.raises(ModelError, match="no such folder"):
        find_model_folder(path)
