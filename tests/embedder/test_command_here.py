"""The command that hints name is one that the shell finds."""

import sys
from pathlib import Path

from embedder import installation


def environment(tmp_path, monkeypatch, folder=".venv"):
    scripts = tmp_path / folder / "bin"
    scripts.mkdir(parents=True)
    for name in ("python", "embedder"):
        (scripts / name).touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(scripts / "python"))
    monkeypatch.chdir(tmp_path)
    return scripts


def test_an_active_environment_is_called_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(environment(tmp_path, monkeypatch)))
    assert installation.command_here() == "embedder"


def test_one_that_is_not_active_is_called_by_its_path(tmp_path, monkeypatch):
    scripts = environment(tmp_path, monkeypatch)
    monkeypatch.setenv("PATH", "/nowhere")
    assert installation.command_here() == ".venv/bin/embedder"
    monkeypatch.chdir("/")
    assert installation.command_here() == str(scripts / "embedder").removeprefix("/")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert installation.command_here() == str(scripts / "embedder")


def test_another_installation_on_the_path_is_not_meant(tmp_path, monkeypatch):
    environment(tmp_path, monkeypatch)
    other = tmp_path / "other"
    other.mkdir()
    (other / "embedder").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(other))
    assert installation.command_here() == ".venv/bin/embedder"


def test_without_a_script_beside_the_interpreter_it_is_the_name(tmp_path, monkeypatch):
    (environment(tmp_path, monkeypatch) / "embedder").unlink()
    assert installation.command_here() == "embedder"
    assert Path(sys.executable).exists()
