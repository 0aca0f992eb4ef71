"""Changes of a store as they were recorded, and what their contents say."""

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any

from store_simulation.checker import TABLES

MODEL = r"(?P<folder>models/[^/]+/)?"
_IN_PART = re.compile(MODEL + r"((items|embeddings)/_delta_log|runs/[^/]+/journal)/.+")
"""Files of which some of the content is recorded."""


@dataclass
class Change:
    """One change of the store, as it was recorded."""

    writer: tuple[str, int]  # host and number of its process
    begin_ns: int  # time before it
    end_ns: int | None  # time after it; None where it has no end
    what: str  # put or delete
    paths: tuple[str, ...]  # one, or those that are deleted
    condition: Any = None  # of a put: None, "absent", or the tag of a version
    content: bytes | None = None  # of a put, where it was recorded
    size: int = 0
    outcome: str = "unknown"  # done, refused, or unknown
    tag: dict[str, Any] | None = None  # of the version that was written
    lacking: list[str] = field(default_factory=list)  # what should have been there before it
    is_made: bool = False

    @property
    def path(self) -> str:
        return self.paths[0]

    def is_of(self, tag: Any) -> bool:
        """Whether a tag can be that of what this put writes: servers give the MD5 of a small file."""
        if self.tag is not None:
            return self.tag == tag
        if self.content is None or not isinstance(tag, dict) or _IN_PART.fullmatch(self.path):
            return True
        digests = hashlib.sha256(self.content).hexdigest(), hashlib.md5(self.content).hexdigest()
        known = [str(value).strip('"') for name, value in tag.items() if name in ("sha256", "e_tag")]
        return any(value in digests for value in known) or any(len(value) not in (32, 64) for value in known)


def is_withdrawn(content: bytes | None) -> bool:
    return bool(json.loads(content or b"{}").get("is_withdrawn"))


def folder_of(path: str) -> str:
    return "/".join([*path.split("/")[:2], ""]) if path.startswith("models/") else ""


def files_of(content: bytes | None) -> tuple[list[str], list[str]]:
    """Part files that an entry of a log adds and removes."""
    actions = [json.loads(line) for line in (content or b"").decode().splitlines() if line.strip()]
    added, removed = ([each[kind]["path"] for each in actions if kind in each] for kind in ("add", "remove"))
    return added, removed


def needed_first(content: bytes | None) -> list[str]:
    """Files that must be there before CURRENT.json names them, beside the older entries of logs."""
    if content is None:
        return []
    current = json.loads(content)
    paths = [f"runs/{current['run_id']}/published.json"]
    for model, own in {"": current, **current.get("models", {})}.items():
        folder = f"models/{model}/" if model else ""
        paths += [f"{folder}{name}/_delta_log/{own[name]:020d}.json" for name in TABLES if own[name] >= 0]
        paths += [f"{folder}index/{own['index']:06d}/manifest.json"] if own.get("index") is not None else []
    return paths
