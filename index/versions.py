"""Versions of an index in a store: folders `000001`, `000002`, ... that only appear complete."""

import re
from pathlib import Path

from index.index_errors import RetrievalError
from index.manifest import MANIFEST_NAME

_VERSION_NAME = re.compile(r"[0-9]{6,}")


def version_path(root: str | Path, version: int) -> Path:
    """Return the path of a version, zero-padded so that names sort like numbers; raises a RetrievalError below 1."""
    if version < 1:
        raise RetrievalError(f"{root}: there is no index version {version}; versions count from 1")
    return Path(root) / f"{version:06d}"


def list_versions(root: str | Path) -> tuple[int, ...]:
    """List the complete versions, oldest first."""
    return tuple(version for version in _numbers(root) if (version_path(root, version) / MANIFEST_NAME).is_file())


def next_version(root: str | Path, last: int = 0) -> int:
    """Return the number after the highest one, complete or not: a number is never reused."""
    return max([last, *_numbers(root)]) + 1


def _numbers(root: str | Path) -> list[int]:
    folder = Path(root)
    if not folder.is_dir():
        return []
    numbers = {int(entry.name) for entry in folder.iterdir() if _VERSION_NAME.fullmatch(entry.name)}
    return sorted(number for number in numbers if number >= 1)
