"""Paths in a file follow the file; those of the command line follow the working directory."""

import pytest

from embedder.config import load_config
from embedder.errors import ConfigError
from embedder.plugins.train.train_config import load_train_config

RUN = """
model = "models/mine"
store = "runs/shop"
plan = "plan.json"
log_file = "logs/run.log"
runs_file = "runs.jsonl"
metrics_file = "../metrics/run.prom"
source = [{name = "a", path = "photos"}, {name = "b", path = "photos/*/{a,b}.jpg"}]
on_failure = {command = ["bin/page.sh", "ops/team"]}
serve = {reranker = "models/ranks"}
tracker = {kind = "wandb", folder = "logs/wandb"}
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a configuration and all that it names; the command is run from somewhere else."""
    for folder in ("project/models/mine", "project/models/ranks", "project/photos", "project/bin", "elsewhere"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "project" / "plan.json").touch()
    (tmp_path / "project" / "run.toml").write_text(RUN)
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "project"


@pytest.mark.parametrize("name", ["absolute", "relative", "link"])
def test_each_path_in_a_file_follows_the_file(project, name, monkeypatch):
    (project / "elsewhere.toml").symlink_to(project / "run.toml")
    names = {"absolute": project / "run.toml", "relative": "../project/run.toml", "link": project / "elsewhere.toml"}
    found = load_config(names[name])
    keys = ("model", "store", "plan", "log_file", "runs_file", "metrics_file")
    expected = ("models/mine", "runs/shop", "plan.json", "logs/run.log", "runs.jsonl", "../metrics/run.prom")
    assert {key: getattr(found, key) for key in keys} == {
        key: f"{project}/{path}" for key, path in zip(keys, expected, strict=True)
    }
    assert [source.path for source in found.source] == [f"{project}/photos", f"{project}/photos/*/{{a,b}}.jpg"]
    assert found.on_failure.command == (f"{project}/bin/page.sh", "ops/team")
    assert (found.serve.reranker, found.tracker.folder) == (f"{project}/models/ranks", f"{project}/logs/wandb")
    monkeypatch.chdir("/")
    if name == "absolute":
        assert load_config(names[name]) == found, "from wherever the command is run"


def test_a_training_file_is_followed_too(project):
    (project / "train.toml").write_text(
        'out = "runs/aligned"\ntokenizer = "tokenizer.json"\n[architecture]\n[[source]]\npath = "photos"\n'
    )
    found = load_train_config(project / "train.toml")
    assert (found.out, found.tokenizer) == (f"{project}/runs/aligned", f"{project}/tokenizer.json")
    assert found.source[0].path == f"{project}/photos"


def test_options_and_settings_follow_the_working_directory(project):
    overrides = {"model": "m/x", "store": "s", "source": [{"path": "p"}]}
    found = load_config(project / "run.toml", overrides, ["log_file=l", "plan=other.json"])
    assert (found.model, found.store, found.source[0].path) == ("m/x", "s", "p")
    assert (found.log_file, found.plan) == ("l", "other.json")


@pytest.mark.parametrize(
    "value",
    ["/data/m", "~/models", "s3://team/models", "gs://team/m", "file:///data/m", "hf://org/name", "hf-hub:org/name"],
)
def test_what_is_no_relative_path_stays(project, value):
    (project / "run.toml").write_text(f'model = "{value}"\nstore = "{value}"\n[[source]]\npath = "{value}"\n')
    found = load_config(project / "run.toml")
    assert (found.model, found.store, found.source[0].path) == (value, value, value)


@pytest.mark.parametrize(
    ("value", "is_path"),
    [("org/name", False), ("org/name@v1.0", False), ("models/mine", True), ("./org/name", True), ("name", True)],
)
def test_a_model_is_a_folder_beside_the_file_or_a_hub_id(project, value, is_path):
    (project / "run.toml").write_text(f'model = "{value}"\n')
    assert load_config(project / "run.toml").model == (f"{project}/{value.removeprefix('./')}" if is_path else value)


@pytest.mark.parametrize(
    ("value", "is_path"),
    [("rapidocr", False), ("our_package.models:Own", False), ("own_model:Own", False), ("ocr.onnx", True)],
)
def test_a_further_model_may_be_a_package_or_a_module(project, value, is_path):
    (project / "run.toml").write_text(f'[[model]]\nuri = "models/mine"\n[[model]]\nname = "a"\nuri = "{value}"\n')
    assert load_config(project / "run.toml").model[1].uri == (f"{project}/{value}" if is_path else value)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("model", 'model = "old/thing"'),
        ("store", 'store = "old/thing"'),
        ("plan", 'plan = "old/thing"'),
        ("source.path", '[[source]]\npath = "old/thing"'),
        ("source.path", '[[source]]\npath = "old/*.jpg"'),
    ],
)
def test_what_lies_in_the_working_directory_instead_is_refused_with_both_places(project, tmp_path, key, text):
    (tmp_path / "elsewhere" / "old" / "thing").mkdir(parents=True)
    (project / "run.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(project / "run.toml")
    message = str(caught.value)
    assert message.startswith(f'{project}/run.toml: {key} = "old/')
    assert f"means {project}/old/" in message and f"there is {tmp_path}/elsewhere/old/" in message
    (project / "old" / "thing").mkdir(parents=True)
    load_config(project / "run.toml")


def test_logs_are_begun_beside_the_file_whatever_lies_in_the_working_directory(project, tmp_path):
    (tmp_path / "elsewhere" / "runs.jsonl").touch()
    assert load_config(project / "run.toml").runs_file == f"{project}/runs.jsonl"


@pytest.mark.parametrize("text", ["model = 3", "source = 3", "source = [3]", "on_failure = 3", "source = [{path = 3}]"])
def test_what_is_of_a_wrong_type_is_told_as_elsewhere(project, text):
    (project / "run.toml").write_text(text)
    with pytest.raises(ConfigError, match=": found an integer"):
        load_config(project / "run.toml")
