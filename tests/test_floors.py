"""What is installed next to a library that is there already leaves it as it is; resolved, not installed."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
UV = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
HELD = re.compile(r"(torch|nvidia-|cuda-|triton)")
MACOS_14 = os.environ | {"MACOSX_DEPLOYMENT_TARGET": "14.0"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def resolve(requirements: str, python: str, *options: str) -> set[str]:
    """Versions that an installer would take, as `name==version`; skips the test where no registry answers."""
    options = ("--no-header", "--no-annotate", "--only-binary", ":all:", "--python-version", python, *options, "-")
    return set(run_uv(requirements, "compile", *options).stdout.split())


def run_uv(requirements: str, command: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `uv pip` on the registries that pip is set to; skips the test where none answers."""
    if UV is None:
        pytest.skip("uv is not installed")
    found = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.extra-index-url"],
        capture_output=True,
        text=True,
        check=False,
    )
    extra = [f"--extra-index-url={url}" for url in found.stdout.split()]
    words = [
        UV,
        "pip",
        command,
        *([] if "--verbose" in options else ["--quiet"]),
        "--index-strategy",
        "unsafe-best-match",
        *extra,
        *options,
    ]
    done = subprocess.run(
        words, input=requirements, env=MACOS_14, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    if any(
        word in done.stderr for word in ("error sending request", "Connection refused", "Failed to fetch", "dns error")
    ):
        pytest.skip("no registry of packages answers")
    assert done.returncode == 0, done.stderr
    return done


def project_beside(held: set[str], python: str, folder: Path, *extras: str) -> set[str]:
    constraints = folder / "held.txt"
    constraints.write_text("\n".join(sorted(held)))
    wanted = [*PROJECT["dependencies"], *(each for name in extras for each in PROJECT["optional-dependencies"][name])]
    return resolve("\n".join(wanted), python, "--constraint", str(constraints))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("torch", "python"),
    [
        ("2.8.0", "3.11"),
        ("2.11.0", "3.12"),
        ("2.15.0", "3.14"),
    ],
)
def test_beside_a_torch_that_is_there_no_torch_and_no_cuda_package_is_installed(torch, python, tmp_path):
    held = resolve(f"torch=={torch}\ntorchvision", python)
    taken = project_beside(held, python, tmp_path, "embed")
    assert {each for each in taken if HELD.match(each)} <= held
    assert f"torch=={torch}" in taken


def write_wheel(folder: Path, name: str, version: str) -> str:
    """Write a package that has nothing but its version."""
    path, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return str(path)


@pytest.mark.slow
def test_a_vendors_own_build_of_torch_stays(tmp_path):
    vendors = {"torch": "2.9.0a0+50eac811a6.nv25.9", "torchvision": "0.24.0a0+98f8b375", "triton": "3.4.0+gitc817b9b6"}
    venv.create(tmp_path / "venv")
    here = ["--python", str(tmp_path / "venv" / "bin" / "python")]
    wheels = [write_wheel(tmp_path, name, version) for name, version in vendors.items()]
    run_uv("", "install", *here, "--no-deps", *wheels)
    held = tmp_path / "held.txt"
    held.write_text("".join(f"{name}=={version}\n" for name, version in vendors.items()))
    found = run_uv("", "install", *here, "--dry-run", "--verbose", "--constraint", str(held), f"{ROOT}[embed]")
    taken = re.findall(r"^ \+ (\S+)==", found.stderr, re.M)
    assert "ray" in taken and [each for each in taken if HELD.match(each)] == []


@pytest.mark.slow
@pytest.mark.parametrize("python", ["3.11", "3.14"])
@pytest.mark.parametrize("system", ["x86_64-manylinux_2_28", "aarch64-manylinux_2_28", "aarch64-apple-darwin"])
def test_wheels_of_all_that_is_needed_exist_for_each_system(system, python):
    wanted = [
        *PROJECT["dependencies"],
        *(each for extra in ("embed", "serve") for each in PROJECT["optional-dependencies"][extra]),
    ]
    taken = resolve("\n".join(wanted), python, "--python-platform", system)
    assert {each.partition("==")[0] for each in taken} >= {"torch", "ray", "faiss-cpu", "av", "pillow", "deltalake"}


@pytest.mark.slow
@pytest.mark.parametrize("transformers", ["4.57.6", "5.24.0"])
def test_the_light_installation_leaves_a_transformers_that_is_there_alone(transformers, tmp_path):
    held = resolve(f"transformers=={transformers}", "3.12")
    taken = project_beside(held, "3.12", tmp_path)
    names = {each.partition("==")[0] for each in held}
    assert {each for each in taken if each.partition("==")[0] in names} <= held


def test_no_requirement_has_an_upper_bound_without_a_reason():
    extras = [each for name, extra in PROJECT["optional-dependencies"].items() if name != "dev" for each in extra]
    assert [each for each in [*PROJECT["dependencies"], *extras] if "<" in each or "==" in each or "~=" in each] == []
