"""Plug-ins of another package, of one file, as docs/plugins.md has them; and the core without those of this package."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import samples

import embedder
from embedder import entry_points, servables
from embedder.entry_points import GROUPS, OWN_FILE, TARGETS, TRACKERS, find_plugins, load_plugin
from embedder.errors import ConfigError
from embedder.servables.servable_errors import ServableError

ROOT = Path(embedder.__file__).parents[1]
PAGE = (ROOT / "docs/plugins.md").read_text(encoding="utf-8")
(PYTHON,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
PROJECT, RUN = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the package of the page and its metadata, as an installation leaves them."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "our_plugins.py").write_text(PYTHON)
    points = re.sub(r'\[project\.entry-points\."(.*?)"\]', r"[\1]", PROJECT.partition("\n\n")[2]).replace('"', "")
    metadata = folder / "our_plugins-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: our-plugins\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(points)
    return folder


def run(*words, path=(), cwd=None):
    """Run a command line of this checkout, with further folders before it on the path."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT)))}
    command = [sys.executable, "-m", "embedder", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, cwd=cwd, check=False)


def test_each_entry_of_this_package_is_there_and_can_be_imported():
    for group in GROUPS:
        for name, point in find_plugins(group).items():
            assert point.load() is not None, (group, name)
    assert OWN_FILE.is_file()


@pytest.mark.medium
def test_a_command_and_a_target_of_another_package_are_commands(installed, tmp_path):
    assert run("greet", "Ada", path=[installed]).stdout == "hello Ada\n"
    assert run("deploy", "nomad", "runs/x", tmp_path / "job.hcl", path=[installed]).returncode == 0
    assert "embedder refresh --store runs/x" in (tmp_path / "job.hcl").read_text()
    assert "No such command 'greet'" in run("greet", "Ada").stderr


@pytest.mark.medium
def test_a_command_that_breaks_costs_a_warning_and_no_other_command(tmp_path):
    metadata = tmp_path / "broken-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    points = ("broken = broken:main", "serve = broken:serve", "ends = ends:main", "odd = odd:take", "none = odd:N")
    (metadata / "entry_points.txt").write_text("\n".join(("[embedder.commands]", *points)))
    (tmp_path / "broken.py").write_text("raise RuntimeError('out of order')\n")
    (tmp_path / "ends.py").write_text("raise SystemExit(7)\n")
    (tmp_path / "odd.py").write_text("N = 3\ndef take(x: 'Unknown'): ...\n")
    own = run("config", "--help", path=[tmp_path])
    assert own.returncode == 0 and "broken" not in own.stderr, "a command imports no other"
    done = run("--help", path=[tmp_path])
    assert done.returncode == 0 and "config" in done.stdout
    assert "command broken (broken:main) can't be loaded: out of order; reinstall its package" in done.stderr
    assert {"command ends (ends:main)", "command odd (odd:take)", "command none (odd:N)"} <= {
        line.partition(" can't be loaded")[0] for line in done.stderr.splitlines()
    }
    assert "serve" in done.stderr and "has the name already" in done.stderr


@pytest.fixture(params=["raise RuntimeError('out of order')", "import no_such_package", "1 +", "exit(7)"])
def broken(request, tmp_path, monkeypatch):
    """The one plug-in of a group, by name; its module can't be imported."""
    (tmp_path / "broken.py").write_text(request.param)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    return lambda group: {"broken": EntryPoint("broken", "broken:Found", group)}


def test_a_tracker_that_cannot_be_imported_is_told_in_a_line(broken, monkeypatch):
    monkeypatch.setattr(entry_points, "find_plugins", broken)
    with pytest.raises(ConfigError, match=r"^here: broken \(broken:Found\) can't be loaded: .+; reinstall"):
        load_plugin(TRACKERS, "broken", "here")


def test_a_kind_of_model_that_cannot_be_imported_is_told_in_a_line(broken, monkeypatch):
    monkeypatch.setattr(servables, "find_plugins", broken)
    found = r"^servable tags: kind = 'broken' \(broken:Found\) can't be loaded: .+; reinstall its package$"
    with pytest.raises(ServableError, match=found):
        servables.make_servable({"name": "tags", "kind": "broken", "uri": "m"})


@pytest.mark.medium
def test_a_tracker_and_a_kind_of_model_of_another_package_take_part_in_a_run(installed, tiny_model, tmp_path):
    (tmp_path / "models").mkdir()
    shutil.copytree(tiny_model, tmp_path / "models/tower")
    (tmp_path / "runs").mkdir()
    samples.folder(tmp_path / "pictures", 3)
    (tmp_path / "run.toml").write_text(f'engine = "local"\nstore = "runs/store"\n{RUN}')
    done = run("embed", "pictures", "--config", "run.toml", path=[installed], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "runs/lines.jsonl").read_text().splitlines()]
    assert lines[0]["begin"].startswith("embed ") and lines[-1] == {"succeeded": True}
    rows = embedder.open_store(tmp_path / "runs/store").to_arrow()
    assert rows.num_rows == 3
    assert (tmp_path / "runs/store/models/light").is_dir()
    refused = run("embed", "pictures", "--config", "run.toml", cwd=tmp_path)
    assert refused.returncode == 2
    assert "lines" in refused.stderr and "mlflow, wandb" in refused.stderr


@pytest.mark.slow
def test_without_the_folder_of_plugins_the_core_embeds_refreshes_and_searches(tiny_model, tmp_path):
    for name in ("embedder", "shards", "index"):
        shutil.copytree(
            ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "plugins", "demo_data")
        )
    source = samples.folder(tmp_path / "in", 4)
    (tmp_path / "run.toml").write_text(
        f'model = "{tiny_model}"\nstore = "store"\nengine = "local"\n[[source]]\npath = "{source}"\n'
    )

    def core(*words):
        done = run(*words, path=[tmp_path], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    core("embed", "--config", "run.toml")
    (source / "pictures" / "0000.png").unlink()
    core("refresh", "run.toml", "--force", "retire")
    core("index", "build", "--store", "store")
    found = core("search", "a red car", "--store", "store", "--json")
    assert len(json.loads(found.splitlines()[-1])["hits"]) == 3
    assert "No such command 'serve'" in run("serve", "store", path=[tmp_path], cwd=tmp_path).stderr


@pytest.mark.parametrize("order", [("first", "second"), ("second", "first")])
def test_of_two_packages_with_one_name_the_same_one_counts_however_they_were_installed(monkeypatch, order):
    points = tuple(EntryPoint("nomad", f"{name}:write", TARGETS) for name in order)
    monkeypatch.setattr(entry_points, "_read_entry_points", lambda: points)
    find_plugins.cache_clear()
    try:
        assert find_plugins(TARGETS)["nomad"].value == "first:write"
    finally:
        find_plugins.cache_clear()
