"""What is installed beside a library that is there already leaves it as it is; resolved, not installed."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
UV = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
HELD = re.compile(r"(torch|nvidia-|cuda-|triton)")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def resolve(requirements: str, python: str, *options: str) -> set[str]:
    """Versions that an installer would take, as `name==version`; skips the test where no registry answers."""
    if UV is None:
        pytest.skip("uv is not installed")
    found = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.extra-index-url"],
        capture_output=True,
        text=True,
        check=False,
    )
    extra = [f"--extra-index-url={url}" for url in found.stdout.split()]
    command = [
        UV,
        "pip",
        "compile",
        "--quiet",
        "--no-header",
        "--no-annotate",
        "--only-binary",
        ":all:",
        "--index-strategy",
        "unsafe-best-match",
    ]
    command += ["--python-version", python, *extra, *options, "-"]
    done = subprocess.run(
        command, input=requirements, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    if any(
        word in done.stderr for word in ("error sending request", "Connection refused", "Failed to fetch", "dns error")
    ):
        pytest.skip("no registry of packages answers")
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def project_beside(held: set[str], python: str, folder: Path, *extras: str) -> set[str]:
    constraints = folder / "held.txt"
    constraints.write_text("\n".join(sorted(held)))
    wanted = [*PROJECT["dependencies"], *(each for name in extras for each in PROJECT["optional-dependencies"][name])]
    return resolve("\n".join(wanted), python, "--constraint", str(constraints))


@pytest.mark.slow(rotates=True)
@pytest.mark.parametrize(
    ("torch", "python"),
    [
        ("2.8.0", "3.11"),
        ("2.8.0", "3.12"),
        ("2.9.1", "3.13"),
        ("2.11.0", "3.12"),
        ("2.13.0", "3.14"),
        ("2.15.0", "3.14"),
    ],
)
def test_beside_a_torch_that_is_there_no_torch_and_no_cuda_package_is_installed(torch, python, tmp_path):
    held = resolve(f"torch=={torch}\ntorchvision", python)
    taken = project_beside(held, python, tmp_path, "embed")
    assert {each for each in taken if HELD.match(each)} <= held
    assert f"torch=={torch}" in taken


@pytest.mark.slow(rotates=True)
@pytest.mark.parametrize("transformers", ["4.57.6", "5.24.0"])
def test_the_light_installation_leaves_a_transformers_that_is_there_alone(transformers, tmp_path):
    held = resolve(f"transformers=={transformers}", "3.12")
    taken = project_beside(held, "3.12", tmp_path)
    names = {each.partition("==")[0] for each in held}
    assert {each for each in taken if each.partition("==")[0] in names} <= held


def test_no_requirement_has_an_upper_bound_without_a_reason():
    extras = [each for name, extra in PROJECT["optional-dependencies"].items() if name != "dev" for each in extra]
    assert [each for each in [*PROJECT["dependencies"], *extras] if "<" in each or "==" in each or "~=" in each] == []
