"""Steps of a configuration, resolved: functions are found without an import, and what decides results is hashed."""

from dataclasses import replace
from importlib.metadata import EntryPoint

import pytest
from own_steps import STEPS, steps_file

from embedder.config_toml.own_code_sections import StepConfig, with_declared
from embedder.servables.servable_errors import ServableError
from embedder.user_steps import declared_steps as declared
from embedder.user_steps.calls import StepCalls
from embedder.user_steps.declared_steps import StepError, check_columns, open_step, step_fingerprints


def section(callable_, **keys):
    return StepConfig(**{"name": "own", "callable": str(callable_), "inputs": ("caption",)} | keys)


def fingerprint(*steps):
    return step_fingerprints(steps)["own"]


def test_a_fingerprint_follows_what_decides_results_and_nothing_else(tmp_path):
    file = steps_file(tmp_path)
    (tmp_path / "words.txt").write_text("one")
    place = f"{file}:windows"
    before = fingerprint(section(place))
    assert len(before) == 16
    same = {"batch_size": 7, "timeout_s": 5, "memory_bytes": 1 << 30, "num_cpus": 2, "max_rows": 9, "max_side_px": 99}
    assert fingerprint(section(place, **same)) == before
    others = [
        section(f"{file}:norm"),
        section(place, settings={"num_words": 4}),
        section(place, outputs={"length": "int32"}),
        section(place, optional=("uri",)),
        section(place, where="before_write"),
        section(place, one_to_many=True, outputs={"caption": "string"}),
        section(place, extra_files=(str(tmp_path / "words.txt"),)),
    ]
    found = [fingerprint(each) for each in others]
    assert len({before, *found}) == len(others) + 1
    (tmp_path / "words.txt").write_text("another")
    assert fingerprint(others[-1]) != found[-1]
    steps_file(tmp_path, STEPS + "\n# a remark\n")
    assert fingerprint(section(place)) != before
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    assert fingerprint(section(f"{steps_file(moved, STEPS)}:windows")) == before, "the folder decides nothing"


def test_an_entry_point_is_a_function_of_its_package(monkeypatch):
    points = {declared.STEPS: {"shout": EntryPoint("shout", "json:dumps", declared.STEPS)}}
    monkeypatch.setattr(declared, "find_plugins", points.__getitem__)
    step = open_step(section("shout"))
    assert (step.place, step.function, step.files[0].endswith("json/__init__.py")) == ("json", "dumps", True)
    with pytest.raises(StepError, match=r"no entry point 'whisper' of the group embedder.steps \(there are: shout\)"):
        open_step(section("whisper"))


@pytest.mark.parametrize(
    ("callable_", "said"),
    [
        ("absent.py:own", "there is no such file"),
        ("no_such_package_of_ours.steps:own", "there is no module 'no_such_package_of_ours.steps'"),
        ("no_such_package_of_ours:own", "there is no module 'no_such_package_of_ours'"),
        ("steps.py:", "expected FILE.py:function"),
        ("steps.py:a b", "expected FILE.py:function"),
        (":own", "expected FILE.py:function"),
    ],
)
def test_a_function_that_is_nowhere_is_told_in_a_line(callable_, said):
    with pytest.raises((StepError, ServableError)) as raised:
        open_step(section(callable_))
    assert said in str(raised.value) and str(raised.value).startswith("step own (") and "\n" not in str(raised.value)


@pytest.mark.parametrize("raised", ["RuntimeError('no licence')", "SystemExit('no licence')"])
def test_a_module_whose_package_raises_is_told_in_a_line(tmp_path, monkeypatch, raised):
    package = tmp_path / "unlicensed"
    package.mkdir()
    (package / "__init__.py").write_text(f"raise {raised}\n")
    (package / "steps.py").write_text("def own(rows):\n    return {}\n")
    monkeypatch.syspath_prepend(tmp_path)
    keys = {"name": "own", "callable": "unlicensed.steps:own", "inputs": ["caption"]}
    assert with_declared(keys) == keys
    with pytest.raises(ServableError, match="package of the module 'unlicensed.steps' can't be imported .*no licence"):
        open_step(section(keys["callable"]))


def test_inputs_that_nothing_gives_and_names_that_are_taken_are_refused():
    first = section("a.py:a", name="first", outputs={"words": "int32"})
    late = section("a.py:a", name="late", where="before_write", inputs=("words", "text_embedding"))
    check_columns([late, first], [])  # those after decoding come first, wherever they stand
    with pytest.raises(StepError, match="there is no column 'price' after decode; there are caption, "):
        check_columns([section("a.py:a", inputs=("price",))], ["weight"])
    check_columns([section("a.py:a", inputs=("price",))], ["price"])
    with pytest.raises(StepError, match="no column 'image_embedding' after decode"):
        check_columns([section("a.py:a", inputs=("image_embedding",))], [])
    with pytest.raises(StepError, match="no column 'image' before write"):
        check_columns([section("a.py:a", where="before_write", inputs=("image",))], [])
    with pytest.raises(StepError, match="returns 'uri', and the embeddings table has a column of that name"):
        check_columns([section("a.py:a", outputs={"uri": "string"})], [])
    with pytest.raises(StepError, match="returns 'price', and the sources have a column of that name"):
        check_columns([section("a.py:a", outputs={"price": "float32"})], ["price"])


def test_a_source_that_changed_since_the_run_began_is_not_run(tmp_path):
    step = open_step(section(f"{steps_file(tmp_path)}:windows"))
    calls = StepCalls(replace(step, digest="0" * 16))
    with pytest.raises(StepError, match="is not what the run began with"):
        calls.start()
