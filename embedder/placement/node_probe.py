"""Facts about one node of a cluster; imports only the standard library.

Sent to nodes by value (`embedder.placement.preflight`), so that one without this package, or with another version of
it, answers too.
"""

import hashlib
import shutil
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TypedDict

PACKAGES = ("embedder", "shards", "index")
# Vectors, or messages between processes, depend on these.
LIBRARIES = ("av", "deltalake", "numpy", "obstore", "pillow", "pyarrow", "pydantic", "timm", "torch", "transformers")
SHARED_MEMORY = "/dev/shm"


class NodeFacts(TypedDict):
    """Facts about a node: Python's major and minor version, digest of this project's code, libraries, and bytes.

    Code and libraries (`LIBRARIES`, public versions) are None if one is missing. `disk_*` is the disk where Ray spills;
    `disk_*` and `shared_*` are 0 if there is none.
    """

    python: str
    code: str | None
    libraries: dict[str, str | None]
    disk_free: int
    disk_total: int
    shared_free: int
    shared_total: int
    object_store: int


def node_facts(spill_folder: str, object_store: int = 0) -> NodeFacts:
    """Collect the facts about the node that this runs on, where Ray spills objects to `spill_folder`."""
    disk_total, disk_free = _space(spill_folder)
    shared_total, shared_free = _space(SHARED_MEMORY)
    return NodeFacts(
        python=".".join(map(str, sys.version_info[:2])),
        code=code_digest(),
        libraries={name: _version(name) for name in LIBRARIES},
        disk_free=disk_free,
        disk_total=disk_total,
        shared_free=shared_free,
        shared_total=shared_total,
        object_store=object_store,
    )


def code_digest() -> str | None:
    """Return a digest of the Python files of this project's packages; None if one of them is missing."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        folder = package_folder(package)
        if folder is None:
            return None
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{package}/{path.relative_to(folder).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def package_folder(package: str) -> Path | None:
    """Find the folder of a package without importing it; None if it is missing."""
    with suppress(ImportError, ValueError):
        spec = find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            return Path(next(iter(spec.submodule_search_locations)))
    return None


def _version(library: str) -> str | None:
    """Return a library's version without its local part: CPU and CUDA builds of one version count as equal."""
    try:
        return version(library).partition("+")[0]
    except PackageNotFoundError:
        return None


def _space(folder: str) -> tuple[int, int]:
    """Return total and free bytes of a folder's disk; zeros if there is no such folder."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return 0, 0
    return usage.total, usage.free
