"""Sections [[model]], [[step]] and [[metric]]: where their paths lead, and what is refused in a line."""

import pickle
import re

import pytest

from embedder.config import RunConfig, load_config
from embedder.config_toml.effective import as_data, effective
from embedder.config_toml.load_config import load
from embedder.config_toml.own_code_sections import MetricConfig
from embedder.config_toml.sections import FurtherModelConfig
from embedder.errors import ConfigError

BOTH = """
[[model]]
uri = "towers"
stages = 2

[[model]]
name = "tags"
kind = "python"
uri = "tags.py:Tags"
inputs = { image = { make = "pixels" }, text = { make = "token_ids", tokenizer = "tok" } }
outputs = { top = { type = "string" } }
"""


def written(folder, text):
    for name in ("towers", "tok"):
        (folder / name).mkdir(exist_ok=True)
    path = folder / "run.toml"
    path.write_text(text)
    return path


def test_the_first_model_is_the_main_one_and_paths_follow_the_file(tmp_path):
    config = load_config(written(tmp_path, BOTH))
    assert config.main_model == config.required_model == str(tmp_path / "towers")
    assert config.num_stages == 2
    (tags,) = config.further_models
    assert tags.settings() == {
        "name": "tags",
        "kind": "python",
        "uri": f"{tmp_path}/tags.py:Tags",
        "inputs": {"image": {"make": "pixels"}, "text": {"make": "token_ids", "tokenizer": str(tmp_path / "tok")}},
        "outputs": {"top": {"type": "string"}},
    }


def test_one_address_means_the_same_as_one_entry(tmp_path):
    one = load_config(written(tmp_path, 'model = "towers"\nnum_stages = 2\nplan = "cut.json"\n'))
    entry = load_config(written(tmp_path, '[[model]]\nuri = "towers"\nstages = 2\nplan = "cut.json"\n'))
    for name in ("main_model", "further_models", "num_stages", "plan"):
        assert getattr(one, name) == getattr(entry, name)


def test_the_effective_configuration_has_the_keys_of_each_kind(tmp_path):
    loaded = load(RunConfig, written(tmp_path, BOTH))
    data = as_data(effective(loaded.config, loaded.origins))
    assert data["model.1.uri"]["value"] == f"{tmp_path}/tags.py:Tags"
    assert data["model.1.outputs"]["value"] == {"top": {"type": "string"}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[model]]\nname = "a"\n', "has no uri"),
        ('[[model]]\nuri = "towers"\n[[model]]\nuri = "b"\n', "the [[model]] of .*b has no name; write one"),
        (
            '[[model]]\nuri = "towers"\n[[model]]\nname = "a"\nuri = "b"\n[[model]]\nname = "a"\nuri = "c"\n',
            'two models have the name "a"',
        ),
        ('[[model]]\nuri = "towers"\n[[model]]\nname = "main"\nuri = "b"\n', 'two models have the name "main"'),
        ('[[model]]\nuri = "towers"\n[[model]]\nname = "A-b"\nuri = "b"\n', "must be lower-case letters, digits and _"),
        ('[[model]]\nuri = "towers"\nkind = "hf"\n', 'the first [[model]] has kind = "hf"; it is the store'),
        ('[[model]]\nuri = "towers"\ntop_k = 2\n', "the first [[model]] has top_k"),
        (
            '[[model]]\nuri = "towers"\n[[model]]\nname = "a"\nuri = "b"\nkind = "onnx"\nplan = "p.json"\n',
            'model "a": plan = .*p.json: only of the kind towers; onnx',
        ),
        (
            '[[model]]\nuri = "towers"\n[[model]]\nname = "a"\nuri = "b"\nkind = "onnx"\nstages = 2\n',
            'model "a": stages = 2: only of the kind towers; onnx runs whole',
        ),
        ('num_stages = 3\n[[model]]\nuri = "towers"\nstages = 2\n', "both say how it is cut"),
        ('plan = "a.json"\n[[model]]\nuri = "towers"\nplan = "b.json"\n', "both say how it is cut"),
        ('model = "towers"\n[[model]]\nuri = "towers"\n', "line 2"),
        ("model = []\n", "has no entry"),
        ("model = 5\n", "model = 5"),
    ],
)
def test_models_that_break_a_rule_are_refused_in_one_line(tmp_path, text, said):
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, text))
    assert "\n" not in str(caught.value)
    pattern = ".*".join(map(re.escape, said.split(".*")))
    assert re.search(pattern, str(caught.value)), caught.value


def test_an_option_beside_the_section_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"\[\[model\]\] stands there, and an option gives model = .*other"):
        load_config(written(tmp_path, BOTH), {"model": "other"})


def test_models_are_plain_values_that_other_processes_get():
    model = FurtherModelConfig(name="a", uri="b", kind="onnx", inputs={"x": {"make": "pixels"}})
    assert pickle.loads(pickle.dumps(model)).settings() == model.settings()


STEP = """
[[step]]
name = "crop"
callable = "own.py:crop"
inputs = ["image"]
"""


def loaded(tmp_path, text):
    (tmp_path / "own.py").write_text("")
    (tmp_path / "run.toml").write_text(text)
    return load_config(tmp_path / "run.toml")


def test_a_steps_file_follows_the_configuration_and_a_module_stays(tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    text = STEP + 'extra_files = ["own.py"]\n' + STEP.replace("crop", "other").replace("own.py", "our.package")
    first, second = loaded(tmp_path, text).step
    assert first.callable == f"{tmp_path / 'own.py'}:crop"
    assert first.extra_files == (str(tmp_path / "own.py"),)
    assert second.callable == "our.package:other"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (STEP.replace('"crop"', '"decode"'), "is a step of the pipeline's own"),
        (STEP.replace('"crop"', '"Crop"'), "lower-case letters"),
        (STEP + STEP, 'two steps have the name "crop"'),
        (STEP + 'optional = ["image"]', "'image' stands twice"),
        (STEP + 'outputs = { size = "int16" }', "int32, int64"),
        (STEP + 'outputs = { "a b" = "int32" }', "a b"),
        (STEP + 'outputs = { box = "region" }', "is only the output region"),
        (STEP + 'outputs = { region = "string" }', "region is of the type region"),
        (STEP.replace('"image"', '"caption"') + 'outputs = { region = "region" }', "add the input image"),
        (STEP + 'where = "before_write"\none_to_many = true', "write after_decode"),
        (STEP + 'where = "before_write"\noutputs = { caption = "string" }', "changes what is embedded"),
        (STEP + 'one_to_many = true\noutputs = { size = "int32" }', "return image, region or caption"),
        (STEP + 'output = "x"', "outputs"),
        (STEP.replace("inputs", "input"), "inputs"),
        (STEP + "inputs_ = []", "inputs"),
        (
            STEP + 'outputs = { a = "int32" }' + STEP.replace("crop", "b") + 'outputs = { a = "int32" }',
            "both return 'a'",
        ),
    ],
)
def test_a_step_that_breaks_a_rule_is_told_in_a_line(tmp_path, text, said):
    with pytest.raises(ConfigError, match="step") as raised:
        loaded(tmp_path, text)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"kind": "sum"}, "needs column"),
        ({"kind": "auroc", "column": "score"}, "needs label"),
        ({"kind": "own", "inputs": ("a",)}, "needs callable"),
        ({"kind": "own", "callable": "m:C"}, "needs inputs"),
        ({"kind": "recall", "column": "score"}, "takes no column"),
        ({"kind": "sum", "column": "a", "label": "b"}, "takes no label"),
        ({"kind": "sum", "column": "a", "settings": {"b": 1}}, "takes no settings"),
        ({"kind": "drift", "column": "score"}, "image_embedding or text_embedding"),
    ],
)
def test_a_metric_with_a_key_too_few_or_too_many_is_refused(values, found):
    with pytest.raises(ValueError, match=found):
        MetricConfig(name="it", **values)


def test_two_metrics_of_one_name_are_refused():
    metrics = [{"name": "a", "kind": "count"}, {"name": "a", "kind": "recall"}]
    with pytest.raises(ValueError, match='two metrics have the name "a"'):
        RunConfig(metric=metrics)


STAGE = """
import a_framework_that_is_not_here

class Base(Stage):
    columns_in = ("image",)
    columns_out: dict = {"size": "int32"}
    resources = {"batch_size": 7, "num_cpus": 2}

class Sized(Base):
    columns_optional = ("caption",)
    where = "after_decode"

class Computed(Base):
    columns_in = tuple(NAMES)

class Greedy(Base):
    resources = {"gpus": 3}

class Listed(Base):
    resources = ("num_cpus", 3)

class Odd(Base):
    columns_out = {["size"]: "int32"}

class Unordered(Base):
    columns_in = {"uri", "segment", "modality", "item_id", "image", "caption"}
"""
CLASS = """
[[step]]
name = "sized"
callable = "stages.py:Sized"
"""


def test_what_a_class_declares_is_read_without_an_import_and_keys_of_the_configuration_go_before_it(tmp_path):
    (tmp_path / "stages.py").write_text(STAGE)
    (step,) = loaded(tmp_path, CLASS).step
    assert (step.inputs, step.optional, step.outputs) == (("image",), ("caption",), {"size": "int32"})
    assert (step.batch_size, step.num_cpus, step.timeout_s) == (7, 2.0, 30.0)
    (step,) = loaded(tmp_path, CLASS + 'inputs = ["uri"]\nbatch_size = 3').step
    assert (step.inputs, step.batch_size, step.num_cpus) == (("uri",), 3, 2.0)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Computed", "Computed.columns_in is computed"),
        ("Greedy", "gpus"),
        ("Absent", "inputs"),
        ("Listed", r"stages.py, line \d+: Listed.resources: write"),
        ("Odd", "Odd.columns_out"),
    ],
)
def test_what_a_class_declares_wrongly_is_told_in_a_line(tmp_path, name, said):
    (tmp_path / "stages.py").write_text(STAGE)
    with pytest.raises(ConfigError, match=said):
        loaded(tmp_path, CLASS.replace("Sized", name))


def test_a_set_of_columns_has_one_order_as_it_is_part_of_the_fingerprint(tmp_path):
    (tmp_path / "stages.py").write_text(STAGE)
    (step,) = loaded(tmp_path, CLASS.replace("Sized", "Unordered")).step
    assert step.inputs == ("caption", "image", "item_id", "modality", "segment", "uri")
