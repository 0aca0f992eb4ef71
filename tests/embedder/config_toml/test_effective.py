"""The effective configuration: loaded again it is the same, and each value's origin is shown."""

import tomllib

import pytest

from embedder.config import RunConfig
from embedder.config_toml.effective import as_data, effective, lines_of
from embedder.config_toml.load_config import load
from embedder.plugins.train.train_config import TrainConfig

RUN = """
model = "models/mine"
num_stages = 2
prices = { L4 = 0.8, "a b" = 1 }

[[source]]
name = "a"
path = "/photos"
columns = { id = "sku" }
carryover = ["x", "tab\\tand \\"quote\\""]

[[source]]
name = "b"
path = "/more/*.jpg"

[[stage]]
replicas = { min = 1, max = 4 }
[[stage]]
num_gpus = 0.5

[decode]
timeout_s = 1e-5
"""
MODELS = """
[[model]]
uri = "/models/mine"
stages = 2
plan = "cut.json"
"""
TRAINING = """
out = "/runs/x"
texts = ["title"]
[[source]]
path = "/photos"
[architecture]
name = "fresh"
vision = { family = "eva" }
[train]
num_steps = 60
learning_rate = 3e-4
"""
LAYERS = TRAINING.replace('[architecture]\nname = "fresh"\nvision = { family = "eva" }', "").replace(
    'out = "/runs/x"', 'out = "/runs/x"\nmodel = "/m"'
).replace("[train]", '[train]\nwhat = "layers"\nvision_layers = [3, 5]')  # fmt: skip


def printed(tmp_path, kind, text, settings=()):
    path = tmp_path / "given.toml"
    path.write_text(text)
    loaded = load(kind, path, settings=settings)
    return loaded, effective(loaded.config, loaded.origins)


@pytest.mark.parametrize(
    ("kind", "text"),
    [(RunConfig, ""), (RunConfig, RUN), (RunConfig, MODELS), (TrainConfig, TRAINING), (TrainConfig, LAYERS)],
    ids=["defaults", "run", "models", "fresh", "layers"],
)
def test_what_is_printed_loads_again_as_the_same_from_any_folder(tmp_path, kind, text):
    loaded, table = printed(tmp_path, kind, text, ["decode.max_pixels=5"])
    (tmp_path / "elsewhere").mkdir()
    again = tmp_path / "elsewhere" / "again.toml"
    again.write_text("\n".join(lines_of(table)))
    assert load(kind, again).config.model_dump() == loaded.config.model_dump() | (
        {"model": "models/mine"} if text == RUN else {}
    )


def test_the_origin_of_each_value_is_told(tmp_path):
    _, table = printed(tmp_path, RunConfig, RUN, ["decode.timeout_s=5", "engine=local"])
    data = as_data(table)
    assert {key: (data[key]["value"], data[key]["from"]) for key in (
        "num_stages", "engine", "dtype", "plan", "prices.L4", 'prices."a b"', "source.0.columns.id", "source.1.path",
        "source.1.columns.id", "stage.0.replicas.max", "stage.1.num_gpus", "decode.timeout_s", "decode.max_pixels",
    )} == {
        "num_stages": (2, "line 3"),
        "engine": ("local", "--set"),
        "dtype": ("auto", "default"),
        "plan": (None, "default"),
        "prices.L4": (0.8, "line 4"),
        'prices."a b"': (1.0, "line 4"),
        "source.0.columns.id": ("sku", "line 9"),
        "source.1.path": ("/more/*.jpg", "line 14"),
        "source.1.columns.id": (None, "default"),
        "stage.0.replicas.max": (4, "line 17"),
        "stage.1.num_gpus": (0.5, "line 19"),
        "decode.timeout_s": (5.0, "--set"),
        "decode.max_pixels": (100_000_000, "default"),
    }  # fmt: skip


def test_a_value_of_the_environment_takes_the_place_of_the_files(tmp_path):
    loaded, _ = printed(tmp_path, RunConfig, "")
    table = effective(loaded.config, loaded.origins, {"ray_address": ("10.0.0.1:6379", "RAY_ADDRESS")})
    assert as_data(table)["ray_address"] == {
        "value": "10.0.0.1:6379", "from": "environment RAY_ADDRESS", "is_masked": False
    }  # fmt: skip
    assert tomllib.loads("\n".join(lines_of(table)))["ray_address"] == "10.0.0.1:6379"


def test_secrets_are_left_out_and_marked(tmp_path):
    text = 'store = "s3://key:T0PS3CRET@b/x"\n[on_failure]\nwebhook = "https://h/T0PS3CRET"\n'
    text += 'command = ["n", "--token", "T0PS3CRET"]\n'
    text += '[tracker]\nkind = "mlflow"\nuri = "sqlite:///x"\noptions = { api_key = "T0PS3CRET", tokenizer = "kept" }\n'
    text += '[[step]]\nname = "a"\ncallable = "a.py:A"\ninputs = ["uri"]\n'
    text += 'settings = { Service_Token = "T0PS3CRET", pad_token = "kept" }\n'
    text += '[[model]]\nuri = "m"\n[[model]]\nname = "b"\nuri = "n"\nsettings = { password = "T0PS3CRET" }\n'
    _, table = printed(tmp_path, RunConfig, text)
    lines = "\n".join(lines_of(table))
    assert "T0PS3CRET" not in lines + str(as_data(table)) and lines.count("a secret is left out") == 6
    assert lines.count('"kept"') == 2
    assert tomllib.loads(lines)["on_failure"]["command"] == ["n", "--token", "***"]


def test_what_toml_cannot_hold_is_said_and_not_lost(tmp_path):
    loaded = load(RunConfig, settings=["store=caf\udce9"])
    lines = list(lines_of(effective(loaded.config, loaded.origins)))
    assert "# store can't stand in TOML: it holds bytes that are no UTF-8 (--set)" in lines
