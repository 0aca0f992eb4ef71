"""`embedder config`, `embedder --version`, and lines of mistakes as the command prints them."""

import re
import tomllib

import pytest
from command_runs import run_here
from light_runs import commands_light

import embedder
from embedder.config import RunConfig, load_config
from embedder.config_toml.config_reference import sections_of
from embedder.plugins.train.train_config import load_train_config


def test_the_version_is_printed_without_a_command():
    ended = run_here("--version")
    assert (ended.code, ended.stdout, ended.stderr) == (0, f"embedder {embedder.__version__}\n", "")


def test_a_file_is_printed_as_toml_that_loads_again(tmp_path):
    long = "a" * 6000  # longer than any line of other commands
    (tmp_path / "run.toml").write_text(
        f'model = "/m"\nstore = "/{long}"\n[[source]]\npath = "/caf\u00e9/\\u202e/*.jpg"\n'
    )
    ended = run_here("config", tmp_path / "run.toml", "--set", "decode.timeout_s=5")
    assert (ended.code, ended.stderr) == (0, "")
    (tmp_path / "again.toml").write_text(ended.stdout)
    config = load_config(tmp_path / "run.toml", settings=["decode.timeout_s=5"])
    assert load_config(tmp_path / "again.toml") == config and config.store == f"/{long}"
    assert "\u202e" not in ended.stdout
    assert re.search(r'^model = "/m" +# line 1$', ended.stdout, re.MULTILINE)
    assert re.search(r"^timeout_s = 5.0 +# --set$", ended.stdout, re.MULTILINE)
    assert re.search(r'^dtype = "auto" +# default$', ended.stdout, re.MULTILINE)


def test_a_training_file_is_told_by_its_keys(tmp_path):
    (tmp_path / "train.toml").write_text('model = "/m"\nout = "/o"\n[train]\nnum_steps = 60\n[[source]]\npath = "/a"\n')
    ended = run_here("config", tmp_path / "train.toml")
    (tmp_path / "again.toml").write_text(ended.stdout)
    assert load_train_config(tmp_path / "again.toml") == load_train_config(tmp_path / "train.toml")
    assert tomllib.loads(ended.stdout)["train"]["warmup_steps"] == 6


def test_the_environment_is_told_where_it_decides(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv("EMBEDDER_FAST_START", "0")
    (tmp_path / "run.toml").write_text('model = "/m"\n')
    found = run_here("config", tmp_path / "run.toml", "--json").found
    assert (found["kind"], found["file"]) == ("run", str(tmp_path / "run.toml"))
    assert found["keys"]["ray_address"] == {
        "value": "10.0.0.1:6379", "from": "environment RAY_ADDRESS", "is_masked": False
    }  # fmt: skip
    assert found["keys"]["fast_start"]["value"] is False
    assert found["keys"]["model"] == {"value": "/m", "from": "line 1", "is_masked": False}
    for settings in ("engine=local", "ray_address=local"):
        found = run_here("config", tmp_path / "run.toml", "--set", settings, "--json").found
        assert "environment" not in found["keys"]["ray_address"]["from"]


def test_mistakes_have_a_line_each_and_secrets_are_masked(tmp_path):
    (tmp_path / "run.toml").write_text('dtype = "fp16"\nstore = 5\n[on_failure]\nwebhook = "s3://k:T0PS3CRET@b"\n')
    ended = run_here("config", tmp_path / "run.toml")
    lines = ended.stderr.splitlines()
    assert (ended.code, ended.stdout, len(lines)) == (2, "", 3)
    assert all(line.startswith(f"embedder: {tmp_path}/run.toml, line ") for line in lines)
    assert "T0PS3CRET" not in ended.stderr


@pytest.mark.medium
def test_the_reference_has_every_key_with_its_meaning():
    ended = run_here("config", "--reference")
    assert ended.code == 0
    printed = " ".join(ended.stdout.split())
    for section in sections_of(RunConfig):
        assert section.heading in printed
        for key in section.keys:
            assert key.name in printed and key.type in printed and key.meaning in printed
    found = run_here("config", "--reference", "--json").found
    assert {section["heading"] for section in found["training"]} >= {
        "",
        "[train]",
        "[validation]",
        "[architecture.text]",
    }
    code_with_a_file = run_here("config", "run.toml", "--reference")
    assert code_with_a_file.code == 2 and "--reference prints the keys of every file" in code_with_a_file.stderr


@pytest.mark.medium
def test_it_runs_in_the_light_installation():
    ended = commands_light(["config", "--reference"], ["config"], ["--version"])
    assert [(each.code, each.stderr) for each in ended] == [(0, "")] * 3
