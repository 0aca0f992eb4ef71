"""Measurements kept between runs: a JSON file for each key in the user's cache folder; a broken file counts as none."""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, Self, TypeVar

from shards.errors import ModelError


class Kept(Protocol):
    """What can be written as JSON text, and read strictly."""

    def to_json(self) -> str:
        """The text."""

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the text; raises ModelError where it is something else."""


KeptT = TypeVar("KeptT", bound=Kept)


def cached(kind: type[KeptT], key: Mapping[str, object], make: Callable[[], KeptT]) -> KeptT:
    """Read what was kept for this key, or make it and keep it.

    Args:
        kind: the class of what is kept.
        key: all that it depends on.
        make: measures anew.
    """
    path = cache_folder() / f"{kind.__name__}-{_digest(key)}.json"
    try:
        return kind.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ModelError):
        made = make()
    _keep(path, made.to_json())
    return made


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
