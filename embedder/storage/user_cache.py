"""Local cache folders, for what could be made or fetched again."""

import os
from contextlib import suppress
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Return a folder in the user's cache (`XDG_CACHE_HOME`, else `~/.cache`), which may not exist yet."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "embedder" / name


def mark_used(copy: Path) -> None:
    """Set a cached copy's time to now, as the last used ones are kept; another user's copy is left alone."""
    with suppress(OSError):
        os.utime(copy)
