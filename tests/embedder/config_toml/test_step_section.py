"""`[[step]]`: what breaks its rules is told with the step's name, and its paths follow the file."""

import pytest

from embedder.config import load_config
from embedder.errors import ConfigError

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


def test_a_file_follows_the_configuration_and_a_module_stays(tmp_path, monkeypatch):
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
        (STEP + 'outputs = { box = "region" }', "is the output region alone"),
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
def test_what_breaks_a_rule_is_told_in_a_line(tmp_path, text, said):
    with pytest.raises(ConfigError, match="step") as raised:
        loaded(tmp_path, text)
    assert said in str(raised.value)


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
    ("name", "said"), [("Computed", "Computed.columns_in is computed"), ("Greedy", "gpus"), ("Absent", "inputs")]
)
def test_what_a_class_declares_wrongly_is_told_in_a_line(tmp_path, name, said):
    (tmp_path / "stages.py").write_text(STAGE)
    with pytest.raises(ConfigError, match=said):
        loaded(tmp_path, CLASS.replace("Sized", name))
