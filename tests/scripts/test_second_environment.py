"""Environments for servables' other interpreters; here of links alone, so that nothing is downloaded."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import second_environment


def made(capsys, *arguments):
    second_environment.main([*map(str, arguments)])
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def answer(python, source):
    return subprocess.run([python, "-I", "-c", source], check=True, capture_output=True, text=True).stdout.strip()


def test_what_is_shared_is_there_with_its_needs_and_nothing_else_is(tmp_path, capsys):
    found = made(capsys, tmp_path / "env", "--install", "--share", "jinja2", "numpy")
    versions = {second_environment.canonical(name): each for name, each in found["versions"].items()}
    expected = {name: version(name) for name in ("jinja2", "markupsafe", "numpy")}
    assert versions == expected | {"python": sys.version.split()[0]}
    assert Path(found["python"]).parent == tmp_path / "env/bin"
    assert answer(found["python"], "import jinja2; print(jinja2.Template('{{ 1 + 1 }}').render())") == "2"
    assert answer(found["python"], "import numpy; print(numpy.ones(3).sum())") == "3.0"
    assert answer(found["python"], "import importlib.util as u; print(u.find_spec('pyarrow'))") == "None"


def test_no_pip_can_remove_what_is_linked(tmp_path, capsys):
    found = made(capsys, tmp_path / "env", "--install", "--share", "markupsafe")
    command = [sys.executable, "-m", "pip", "--python", found["python"], "uninstall", "--yes", "markupsafe"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode != 0, ended.stdout
    assert answer(found["python"], "import markupsafe; print(markupsafe.escape('<'))") == "&lt;"
    assert answer(sys.executable, "import markupsafe; print(markupsafe.escape('<'))") == "&lt;"


def test_made_again_it_is_as_before(tmp_path, capsys):
    first = made(capsys, tmp_path / "env", "--install", "--share", "markupsafe")
    assert made(capsys, tmp_path / "env", "--install", "--share", "markupsafe") == first


def test_a_folder_with_something_else_and_what_is_not_here_are_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(SystemExit, match="something else than a virtual environment"):
        second_environment.main([str(tmp_path)])
    with pytest.raises(SystemExit, match="no_such_package: not installed here"):
        second_environment.main([str(tmp_path / "env"), "--install", "--share", "no_such_package"])
