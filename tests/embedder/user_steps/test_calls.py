"""Calls of a function in its process: what it returned is brought to the declared types, or the row is a reject."""

import os
import subprocess
import venv
from pathlib import Path

import pyarrow as pa
import pytest

import embedder
from embedder.config_toml.own_code_sections import StepConfig, with_declared
from embedder.servables.servable_errors import ServableError
from embedder.steps.item_decoder import ItemProblem
from embedder.user_steps.calls import StepCalls
from embedder.user_steps.declared_steps import open_step

SOURCE = """
import ast, os, sys
import neighbour

def give(batch, value="None", rows=-1):
    rows = batch.num_rows if rows < 0 else rows
    return {"value": [ast.literal_eval(value)] * rows}

def fill(batch):
    return {"value": [bytearray(1 << 30)[:1] for _ in batch["caption"]] and [1]}

def secret(batch):
    return {"value": [os.environ.get("OUR_SECRET_KEY", "hidden") + str(neighbour.ONE)] * batch.num_rows}

def die(batch):
    os._exit(3)

def find(batch):
    raise FileNotFoundError(os.fsdecode(b"caf\\xe9.txt"))

def nothing(batch):
    print("said on standard output")

import embedder

class Counter(embedder.Stage):
    columns_in = ("caption",)
    columns_out = {"value": "int32"}

    def __init__(self, start=0):
        self.count = start

    def setup(self):
        self.count += 100

    def process(self, rows):
        self.count += 1
        return {"value": [self.count] * rows.num_rows}

    def close(self):
        with open(__file__ + ".closed", "w"):
            pass
"""


@pytest.fixture
def called(tmp_path):
    """Calls a function of the file with captions; gives what it returned of each row."""
    (tmp_path / "own.py").write_text(SOURCE)
    (tmp_path / "neighbour.py").write_text("ONE = 1\n")
    made = []

    def call(function, kind, captions=("a", "b"), *, many=False, **keys):
        config = StepConfig(
            name="own",
            callable=f"{tmp_path / 'own.py'}:{function}",
            inputs=("caption",),
            outputs={"value": kind},
            **keys,
        )
        calls = StepCalls(open_step(config))
        made.append(calls)
        batch = pa.record_batch({"caption": pa.array(captions, pa.string())})
        return calls.many(batch) if many else calls.each(batch)

    yield call
    for calls in made:
        calls.close()


ELSEWHERE = """
import sys
import pyarrow as pa
from embedder.config_toml.own_code_sections import StepConfig
from embedder.user_steps.calls import StepCalls
from embedder.user_steps.declared_steps import open_step

keys = {"name": "own", "inputs": ("caption",), "outputs": {"value": "string"}}
calls = StepCalls(open_step(StepConfig(callable=sys.argv[1] + ":Own", **keys)))
print(calls.each(pa.record_batch({"caption": ["a"]})))
"""


@pytest.mark.parametrize("is_file", [True, False])
def test_packages_that_pythonpath_names_are_there_for_a_step(tmp_path, is_file):
    venv.create(tmp_path / "bare", symlinks=True)
    step = tmp_path / "seen" / "own_step.py"
    step.parent.mkdir()
    step.write_text(
        "import embedder\n\n\nclass Own(embedder.Stage):\n    def process(self, rows):\n"
        "        return {'value': [embedder.__file__]}\n"
    )
    root = Path(embedder.__file__).parents[1]
    places = [str(root), str(Path(pa.__file__).parents[1]), str(step.parent)]
    ended = subprocess.run(
        [tmp_path / "bare/bin/python", "-c", ELSEWHERE, step if is_file else "own_step"],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": ":".join(places)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stdout == f"[{{'value': '{root / 'embedder/__init__.py'}'}}]\n", ended.stderr


@pytest.mark.medium
@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("float32", 1.5, 1.5),
        ("float64", 3, 3.0),
        ("int32", 7, 7),
        ("string[]", ["x", "y"], ["x", "y"]),
        ("float32[]", [1, 2], [1.0, 2.0]),
        ("bool", True, True),
        ("string", None, None),
    ],
)
def test_values_are_brought_to_the_declared_types(called, kind, value, expected):
    assert called("give", kind, settings={"value": repr(value)}) == [{"value": expected}] * 2


@pytest.mark.medium
@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        ("int32", 2**40, "value: Integer value"),
        ("int64", 1.5, "it returned double, and declares int64"),
        ("string", 5, "it returned int64, and declares string"),
        ("int32", "5", "it returned string, and declares int32"),
        ("string[]", "x", "it returned string, and declares list"),
    ],
)
def test_values_of_another_kind_are_a_reject_of_each_row(called, kind, value, said):
    found = called("give", kind, settings={"value": repr(value)})
    assert [type(each) for each in found] == [ItemProblem] * 2
    assert all(each.step == "own" and each.error_type == "WrongOutput" and said in each.error for each in found)


@pytest.mark.medium
def test_one_row_becomes_as_many_as_are_allowed(called):
    assert called("give", "int32", ("a",), many=True, settings={"rows": 0}) == []
    assert len(called("give", "int32", ("a",), many=True, settings={"rows": 1000})) == 1000
    found = called("give", "int32", ("a",), many=True, settings={"rows": 1001})
    assert "1001 rows for one, max_rows is 1000" in found.error


@pytest.mark.medium
def test_secrets_stay_here_and_neighbours_are_found(called, monkeypatch):
    monkeypatch.setenv("OUR_SECRET_KEY", "seen")
    assert called("secret", "string") == [{"value": "hidden1"}] * 2


def test_memory_is_limited(called):
    (found,) = called("fill", "int32", ("a",), memory_bytes=800 << 20)
    assert found.error_type == "MemoryError"


def test_what_returns_nothing_is_told(called):
    (found,) = called("nothing", "int32", ("a",))
    assert (found.error_type, "NoneType" in found.error) == ("TypeError", True)


def test_an_error_that_quotes_a_name_which_is_no_utf8_fits_into_a_table(called):
    (found,) = called("find", "int32", ("a",))
    assert pa.array([found.error], pa.string()).to_pylist() == ["caf\\xe9.txt"]


@pytest.mark.medium
def test_a_function_whose_process_dies_each_time_is_given_up(called):
    with pytest.raises(ServableError, match="exit code 3.*20 in 20"):
        called("die", "int32", tuple("abcdefghijklmnopqrstuvwxyz"))


@pytest.mark.medium
def test_settings_are_arguments_of_a_class(called):
    assert called("Counter", "int32", settings={"start": 7}) == [{"value": 108}] * 2


@pytest.mark.medium
def test_an_instance_lives_from_batch_to_batch_and_is_closed(tmp_path):
    (tmp_path / "own.py").write_text(SOURCE)
    (tmp_path / "neighbour.py").write_text("ONE = 1\n")
    section = with_declared({"name": "own", "callable": f"{tmp_path / 'own.py'}:Counter"})
    calls = StepCalls(open_step(StepConfig(**section)))
    batch = pa.record_batch({"caption": ["a"]})
    assert [calls.each(batch) for _ in range(3)] == [[{"value": 101}], [{"value": 102}], [{"value": 103}]]
    calls.close()
    assert (tmp_path / "own.py.closed").exists()
