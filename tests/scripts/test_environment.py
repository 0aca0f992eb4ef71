"""`scripts/environment` installs with uv, and with pip where uv can't; each script installs what it needs."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = """#!/bin/bash
case "$*" in
    *hashlib*) cat >/dev/null; echo stamp; exit ;;
    *"config get global.index-url"*) echo https://registry.example/simple; exit ;;
    *"config get"*) exit 1 ;;
    *"-m pip install"*) echo "pip ${@: -1}" >>"$LOG" ;;
esac
[[ "$*" != *uv==* ]] || exit "$NO_UV"
"""
UV = """#!/bin/bash
echo "uv ${@: -1} from $UV_DEFAULT_INDEX" >>"$LOG"
exit "$UV_FAILS"
"""


@pytest.fixture
def installed_by(tmp_path):
    """Sources the file in a checkout with a stand-in for Python and uv; gives what was installed, and what was said."""
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "environment", tmp_path / "scripts")
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    for name, text in (("python", PYTHON), ("uv", UV)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)

    def install(extras="dev", *, no_uv=0, uv_fails=0, **variables):
        log = tmp_path / "log"
        log.write_text("")
        settings = {"LOG": str(log), "NO_UV": str(no_uv), "UV_FAILS": str(uv_fails), "PYTHON": str(programs / "python")}
        command = ["bash", "-euo", "pipefail", "-c", f"extras={extras}; source {tmp_path}/scripts/environment"]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
        done = subprocess.run(
            command, env=kept | settings | variables, capture_output=True, text=True, timeout=60, check=True
        )
        return log.read_text().splitlines(), done.stderr

    return install


def test_uv_installs_from_the_registry_of_pip_and_a_line_says_what_and_how_large(installed_by):
    (uv, project), said = installed_by()
    assert uv.startswith("pip uv==") and project == "uv .[dev] from https://registry.example/simple"
    assert "installing .[dev] into .venv, once: 8 GB on disk" in said


def test_pip_installs_where_uv_is_not_to_be_had_fails_or_is_not_wanted(installed_by, tmp_path):
    for options in ({"no_uv": 1}, {"uv_fails": 1}, {"EMBEDDER_INSTALLER": "pip"}):
        (tmp_path / ".venv" / ".installed").unlink(missing_ok=True)
        lines, said = installed_by(**options)
        assert lines[-1] == "pip .[dev]"
        assert ("uv could not install it" in said) == ("uv_fails" in options)


def test_what_is_installed_is_remembered_with_its_extras(installed_by):
    assert installed_by("embed,serve")[0] and not installed_by("embed,serve")[0]
    assert installed_by("dev")[0], "an environment of the demo has nothing for tests"
    assert not installed_by("embed,serve")[0], "one for tests has all that the demo needs"


def test_the_demo_installs_less_than_tests_need():
    assert "extras=embed,serve\n" in (ROOT / "scripts" / "demo").read_text()
    assert "extras=" not in (ROOT / "scripts" / "test").read_text()
