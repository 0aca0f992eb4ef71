"""Cache of measurements: a JSON file for each key in the user's cache folder; a broken file counts as none."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, Self, TypeVar

from embedder.storage.atomic_write import atomic_write
from shards.errors import ModelError


class CachedProfile(Protocol):
    """Value that is written as JSON text, and read strictly."""

    def to_json(self) -> str:
        """Write as JSON text."""

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the text; raises ModelError for any other text."""


KeptT = TypeVar("KeptT", bound=CachedProfile)


def cached(kind: type[KeptT], key: Mapping[str, object], make: Callable[[], KeptT]) -> KeptT:
    """Read the cached value of a key, or make it and cache it.

    Args:
        kind: class of the value.
        key: all that it depends on.
        make: measures it.
    """
    found = kept(kind, key)
    if found is None:
        found = make()
        _keep(_path(kind, key), found.to_json())
    return found


def kept(kind: type[KeptT], key: Mapping[str, object]) -> KeptT | None:
    """Read the cached value of a key; None where there is no whole one."""
    try:
        return kind.from_json(_path(kind, key).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ModelError):
        return None


def _path(kind: type[CachedProfile], key: Mapping[str, object]) -> Path:
    return cache_folder() / f"{kind.__name__}-{_digest(key)}.json"


def cache_folder() -> Path:
    """Folder of the cache."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "embedder" / "costs"


def _digest(key: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


def _keep(path: Path, text: str) -> None:
    """Write the file whole or not at all; where it can't be written, the next run measures again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.write(text.encode())
    except OSError:
        return
