"""What a submission sends: the code, the configuration and its files, and a command line that the command takes."""

import io
import json
import shlex
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
import samples
from light_runs import commands_light
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from embedder.config import load_config
from embedder.errors import ConfigError
from embedder.placement.node_probe import PACKAGES, package_folder
from embedder.plugins.deploy.submission import packages, submit_command
from embedder.plugins.deploy.submission.packages import code_package, package_of
from embedder.plugins.deploy.submission.submit import (
    SUPPORTED_RAY,
    check_version,
    describe_job,
    local_paths,
    wanted_libraries,
)

PYPROJECT = Path(__file__).parents[4] / "pyproject.toml"


def unpacked(package):
    with zipfile.ZipFile(io.BytesIO(package.content)) as file:
        return {name: file.read(name) for name in file.namelist()}


def test_the_code_that_is_sent_is_all_python_of_the_packages_and_the_page_without_the_demo():
    sent = unpacked(code_package())
    for package in PACKAGES:
        folder = package_folder(package)
        here = {f"{package}/{path.relative_to(folder).as_posix()}": path.read_bytes() for path in folder.rglob("*.py")}
        assert {name: sent.get(name) for name in here} == here
    assert any(name.startswith("embedder/plugins/serve/page/") for name in sent)
    assert not [name for name in sent if "demo_data/" in name or "demo_model/" in name or "__pycache__" in name]


def test_equal_contents_have_one_name_and_different_ones_another(monkeypatch):
    one = package_of({"a": b"1", "b": b"2"})
    assert one == package_of({"b": b"2", "a": b"1"})
    assert len({one.name, package_of({"a": b"12", "b": b""}).name, package_of({"a": b"1"}).name}) == 3
    assert one.uri == f"gcs://{one.name}" and one.name.endswith(".zip")
    monkeypatch.setattr(packages, "MAX_BYTES", 3)
    with pytest.raises(ConfigError, match=r"4 bytes.*largest is big"):
        package_of({"a": b"1", "big": b"123"})


def test_the_configuration_arrives_as_it_was_with_its_plan_beside_it(make_run, tmp_path):
    source = samples.folder(tmp_path / 'in "quoted" é', num_images=1)
    (tmp_path / "cut.json").write_text("{}")
    config = make_run(
        source,
        plan=str(tmp_path / "cut.json"),
        ray_address="10.0.0.1:6379",
        engine="ray",
        prices={"L4": 0.5},
        index={"recall": 0.9},
        on_failure={"webhook": "https://hooks/secret"},
    )
    job = describe_job(config, kind="embed", arguments=("--retry-rejects",))
    files = unpacked(job.packages[1])
    assert files["plan.json"] == b"{}" and set(files) == {"plan.json", "run.toml"}
    path = tmp_path / "there" / "run.toml"
    path.parent.mkdir()
    path.write_bytes(files["run.toml"])
    (path.parent / "plan.json").write_text("{}")
    assert load_config(path) == config.model_copy(update={"plan": str(path.parent / "plan.json"), "ray_address": None})
    assert shlex.split(job.request["entrypoint"]) == [
        *("exec", "python", "-m", "embedder", "embed", "--config", "run.toml", "--retry-rejects")
    ]
    environment = job.request["runtime_env"]
    assert environment["working_dir"] == job.packages[1].uri and environment["py_modules"] == [job.packages[0].uri]
    assert "secret" not in json.dumps(job.request)
    assert tomllib.loads(files["run.toml"].decode())["source"][0]["path"] == str(source)
    assert local_paths(config) == [config.store, config.model, str(source)]


def test_own_functions_and_classes_go_along_and_their_neighbours_stay_neighbours(make_run, tmp_path):
    for folder, name in (("a", "steps.py"), ("a", "helper.py"), ("b", "steps.py")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_text(f"# {folder}/{name}\n")
    plain = make_run(samples.folder(tmp_path / "in"), engine="ray")
    file = tmp_path / "a" / "steps.py"
    step = {"name": "quality", "callable": f"{file}:quality", "inputs": ["image"], "outputs": {"q": "float32"}}
    other = {"name": "other", "callable": "math:sqrt", "inputs": ["image"], "outputs": {"r": "float32"}}
    own = {"name": "own", "kind": "python", "uri": f"{tmp_path}/b/steps.py:Own", "settings": {"scale": 2}}
    config = make_run(
        samples.folder(tmp_path / "in2"),
        engine="ray",
        model=[{"uri": plain.model}, own],
        step=[step | {"extra_files": [f"{tmp_path}/a/helper.py"]}, other],
    )
    files = unpacked(describe_job(config).packages[1])
    assert {name: content.decode() for name, content in files.items() if name != "run.toml"} == {
        "own/0/steps.py": "# b/steps.py\n",
        "own/1/steps.py": "# a/steps.py\n",
        "own/1/helper.py": "# a/helper.py\n",
    }
    there = tmp_path / "there"
    for name, content in files.items():
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_bytes(content)
    read = load_config(there / "run.toml")
    assert read.further_models[0].uri == f"{there}/own/0/steps.py:Own"
    assert [each.callable for each in read.step] == [f"{there}/own/1/steps.py:quality", "math:sqrt"]
    assert read.step[0].extra_files == (f"{there}/own/1/helper.py",)
    assert local_paths(config) == [config.store, plain.model, config.source[0].path]
    (tmp_path / "a" / "helper.py").unlink()
    with pytest.raises(ConfigError, match="step.extra_files .*/a/helper.py: it can't be read here, to be sent"):
        describe_job(config)


def test_each_model_keeps_its_own_plan(make_run, tmp_path):
    plain = make_run(samples.folder(tmp_path / "in"), engine="ray")
    for name in ("main", "other"):
        (tmp_path / f"{name}.json").write_text(f'"{name}"')
    other = {"name": "other", "kind": "towers", "uri": plain.model, "plan": str(tmp_path / "other.json")}
    models = [{"uri": plain.model, "plan": str(tmp_path / "main.json")}, other, other | {"name": "again"}]
    files = unpacked(describe_job(make_run(samples.folder(tmp_path / "in2"), engine="ray", model=models)).packages[1])
    sent = [files[model["plan"]] for model in tomllib.loads(files["run.toml"].decode())["model"]]
    assert sent == [b'"main"', b'"other"', b'"other"'] and len(files) == 3


def test_a_stop_has_the_time_that_the_run_needs(make_run, tmp_path):
    job = describe_job(make_run(samples.folder(tmp_path / "in"), engine="ray", stop_timeout_s=90.5))
    assert job.request["runtime_env"]["env_vars"] == {"RAY_JOB_STOP_WAIT_TIME_S": "151"}
    assert "pip" not in job.request["runtime_env"], "nothing is installed that nobody asked for"


def test_words_of_the_shell_are_quoted(make_run, tmp_path):
    config = make_run(samples.folder(tmp_path / "in"), engine="ray")
    job = describe_job(config, arguments=("--force", "a; rm -rf $HOME"), python="/opt/my python")
    assert shlex.split(job.request["entrypoint"])[1:] == [
        *("/opt/my python", "-m", "embedder", "refresh", "run.toml", "--force", "a; rm -rf $HOME")
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"store": None}, "no store"),
        ({"model": None}, "no model"),
        ({"source": []}, "no source"),
        ({"engine": "local"}, "would leave the cluster idle"),
        ({"plan": "/no/such/plan.json"}, "plan /no/such/plan.json: it can't be read here"),
    ],
)
def test_what_no_job_could_do_is_refused_here(make_run, tmp_path, changes, message):
    config = make_run(samples.folder(tmp_path / "in"), engine="ray").model_copy(update=changes)
    with pytest.raises(ConfigError, match=message):
        describe_job(config)


def test_versions_are_those_of_the_package():
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    (ray,) = [each for line in extras["embed"] if (each := Requirement(line)).name == "ray"]
    assert ray.specifier == SUPPORTED_RAY == SpecifierSet(">=2.52.1")
    assert "**Ray 2.52.1 or newer**" in (Path(__file__).parents[4] / "docs" / "submit.md").read_text(encoding="utf-8")
    check_version("u", "2.61.1")
    check_version("u", "2.52.1")
    for version in ("2.52.0", "2.9", "1", "unknown"):
        with pytest.raises(ConfigError, match=f"its Ray is {version}, and embedder"):
            check_version("u", version)


def test_what_is_installed_on_request_is_what_the_package_names_without_ray():
    lines = ["numpy>=2.0", 'ray[data]>=2.60; extra == "embed"', 'torch<3; extra == "embed"', 'flask; extra == "dev"']
    assert wanted_libraries(lambda name: lines) == ["numpy>=2.0", "torch<3"]

    def missing(name):
        raise PackageNotFoundError(name)

    with pytest.raises(ConfigError, match="--install: nothing names"):
        wanted_libraries(missing)


@pytest.mark.medium
def test_a_light_installation_submits_and_lists(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('model = "m"\nstore = "s"\n[[source]]\npath = "p"\n')
    nowhere = ["--address", "http://127.0.0.1:1"]
    for ended in commands_light(
        ["submit", path, *nowhere], ["jobs", "list", *nowhere], ["jobs", "stop", "a", *nowhere]
    ):
        assert ended.code == 2 and "http://127.0.0.1:1: it can't be reached" in ended.stderr


def test_a_long_line_of_a_log_is_printed_whole(monkeypatch, capsys):
    line = json.dumps({"metrics": ["\u00e9" * 9000], "mark": "\x1b[1m"})
    server = SimpleNamespace(log=lambda job: f"begins\n{line}\n\x1b[31mred\n")
    monkeypatch.setattr(submit_command, "job_server", lambda address: server)
    submit_command.logs("job-1")
    assert capsys.readouterr().out.splitlines() == ["begins", line, "\\x1b[31mred"]


def test_the_command_refuses_here_what_the_job_would_refuse(run_embedder, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('model = "m"\nstore = "s"\n[[source]]\npath = "p"\n')
    for words, message in (
        (["--address", "http://127.0.0.1:1", "--", "--limt", "3"], "No such option"),
        (["--address", "http://127.0.0.1:1", "--", "--limit", "0"], "limit"),
        (["--address", "http://127.0.0.1:1", "--command", "train"], "a job runs refresh or embed"),
        ([], "no cluster: give --address"),
        (["--address", "http://127.0.0.1:1"], "can't be reached"),
    ):
        code, _, line = run_embedder("submit", path, *words)
        assert code == 2 and message in line and len(line.strip().splitlines()) == 1, line
