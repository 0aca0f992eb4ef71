"""Folders of this machine that hold what could be made or fetched again."""

import os
from contextlib import suppress
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Return a folder in the user's cache (`XDG_CACHE_HOME`, else `~/.cache`), which may not exist yet."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "embedder" / name


def mark_used(copy: Path) -> None:
    """Give a copy in the cache the time of now: those that were used last are kept. Of another user's it stays."""
    with suppress(OSError):
        os.utime(copy)
