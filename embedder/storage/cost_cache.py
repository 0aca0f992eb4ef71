"""Cache of measurements: a JSON file per key in the user's cache folder; a broken file counts as missing."""

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from embedder.storage.atomic_write import atomic_write
from embedder.storage.user_cache import cache_folder
from shards.model_errors import ModelError
from shards.planning.planning_costs import JsonText

KeptT = TypeVar("KeptT", bound=JsonText)


def read_or_make(kind: type[KeptT], key: Mapping[str, object], make: Callable[[], KeptT]) -> KeptT:
    """Read the cached value of a key, or make it and cache it."""
    found = read_kept(kind, key)
    if found is None:
        found = make()
        keep(found, key)
    return found


def keep(value: JsonText, key: Mapping[str, object]) -> None:
    """Cache the value of a key; if it can't be written, the next run measures again."""
    path = _path(type(value), key)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.write(value.to_json().encode())


def read_kept(kind: type[KeptT], key: Mapping[str, object]) -> KeptT | None:
    """Read the cached value of a key; None if missing or broken."""
    try:
        return kind.from_json(_path(kind, key).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ModelError):
        return None


def _path(kind: type[JsonText], key: Mapping[str, object]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_folder("costs") / f"{kind.__name__}-{digest[:16]}.json"
