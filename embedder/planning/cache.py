"""Measurements kept between runs: a JSON file for each key in the user's cache folder; a broken file counts as none."""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, Self, TypeVar

from shards.errors import ModelError


class CachedProfile(Protocol):
    """What can be written as JSON text, and read strictly."""

    def to_json(self) -> str:
        """The text."""

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the text; raises ModelError where it is something else."""


KeptT = TypeVar("KeptT", bound=CachedProfile)


def cached(kind: type[KeptT], key: Mapping[str, object], make: Callable[[], KeptT]) -> KeptT:
    """Read what was kept for this key, or make it and keep it.

    Args:
        kind: the class of what is kept.
        key: all that it depends on.
        make: measures anew.
    """
    found = kept(kind, key)
    if found is None:
        found = make()
        _keep(_path(kind, key), found.to_json())
    return found


def kept(kind: type[KeptT], key: Mapping[str, object]) -> KeptT | None:
    """Read what was kept for this key; none where there is nothing whole."""
    try:
        return kind.from_json(_path(kind, key).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ModelError):
        return None


def _path(kind: type[CachedProfile], key: Mapping[str, object]) -> Path:
    return cache_folder() / f"{kind.__name__}-{_digest(key)}.json"


def cache_folder() -> Path:
    """Where measurements are kept."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "embedder" / "costs"


def _digest(key: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


def _keep(path: Path, text: str) -> None:
    """Write the file whole or not at all; a cache that can't be written only costs the next run its time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
            file.write(text)
        Path(file.name).replace(path)
    except OSError:
        return
