"""The user's folders: home, and local caches for what could be made or fetched again."""

import os
import shutil
from contextlib import suppress
from pathlib import Path


def home_folder() -> Path:
    """Return the user's home folder; for a user who has none, that of containers, as the command line takes it."""
    try:
        return Path.home()
    except RuntimeError:  # without HOME, and without an entry among the users
        return Path("/")


def cache_folder(name: str) -> Path:
    """Return a folder in the user's cache (`XDG_CACHE_HOME`, else `~/.cache`), which may not exist yet."""
    root = os.environ.get("XDG_CACHE_HOME") or home_folder() / ".cache"
    return Path(root) / "embedder" / name


def mark_used(copy: Path) -> None:
    """Set a cached copy's time to now, as the last used ones are kept; another user's copy is left alone."""
    with suppress(OSError):
        os.utime(copy)


def drop_folders(name: str, num_kept: int = 0) -> None:
    """Delete the folders in a cache except those used last; hidden ones are still being made."""
    copies = [path for path in cache_folder(name).glob("*") if path.is_dir() and not path.name.startswith(".")]
    copies.sort(key=_used_at, reverse=True)
    for folder in copies[num_kept:]:
        shutil.rmtree(folder, ignore_errors=True)


def _used_at(copy: Path) -> float:
    with suppress(FileNotFoundError):  # another process has just deleted it
        return copy.stat().st_mtime
    return 0.0
