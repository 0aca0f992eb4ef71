"""Trace of what processes change in stores: with EMBEDDER_STORE_TRACE=FILE, each process appends JSON lines to it.

A change is two lines: before it what is to be done, after it how that ended. A process killed in between leaves only
the first. Both carry the time of a clock that all processes of a machine share, so that effects of two processes with
overlapping times are known to be unordered. `scripts/check_store_trace.py` reads it.

    {"id": 3, "host": "a", "pid": 7, "at_ns": 12, "store": "/data/store", "what": "put", "path": "CURRENT.json",
     "size": 512, "condition": {"sha256": "..."}, "content": "{...}"}
    {"id": 3, "host": "a", "pid": 7, "at_ns": 15, "outcome": "done", "tag": {"sha256": "..."}}

Records are traced with their content; log entries and journals only with the names of part files and entries. The file
contains item ids only if file names do.
"""

import itertools
import json
import os
import re
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from embedder.compat import STORE_TRACE_VARIABLE
from embedder.store.backends import Backend, Condition, Tag, WriteConflictError, content_tag

MAX_CONTENT = 56 << 10
"""Maximum size of a content as JSON in bytes; longer ones are left out, so that a line has less than 64 KiB."""
PATHS_PER_LINE = 200

_RECORD = re.compile(
    r"(models/[^/]+/)?(CURRENT\.json|store\.json|purged\.json|deletions/[^/]+\.json"
    r"|runs/[^/]+/(run|published|publication|interim)\.json)"
)
_ENTRY = re.compile(r"(models/[^/]+/)?(items|embeddings)/_delta_log/\d{20}\.json")
_JOURNAL = re.compile(r"(models/[^/]+/)?runs/[^/]+/journal/[^/]+\.json")
_SEGMENT = re.compile(r"(models/[^/]+/)?runs/[^/]+/journal/sealed-\d+\.jsonl")
_NAME = re.compile(rb'"name":\s*"([^"]+)"')
_NUMBERS = itertools.count(1)


def trace_backend(backend: Backend, address: str) -> Backend:
    """Return a backend that records its changes if this process is asked to, else the backend itself."""
    file = os.environ.get(STORE_TRACE_VARIABLE)
    return cast(Backend, RecordingBackend(backend, Path(file), address)) if file else backend


class RecordingBackend:
    """Backend that appends each change to a file, before and after making it."""

    def __init__(self, backend: Backend, file: Path, address: str, folder: str = "") -> None:
        """Record changes in `file`; `folder` is the backend's root in the store, empty or ending with "/"."""
        self._backend, self._file, self._address, self._folder = backend, file, address, folder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)  # what only reads is not recorded

    def put(self, path: str, data: bytes | Path, condition: Condition) -> Tag:
        """See `Backend`; recorded."""
        place = self._folder + path
        size = len(data) if isinstance(data, bytes) else data.stat().st_size
        content = recorded_content(place, data) if isinstance(data, bytes) else None
        number = self._begin(what="put", path=place, size=size, condition=condition, content=content)
        end: dict[str, Any] = {"outcome": "unknown"}
        try:
            tag = self._backend.put(path, data, condition)
            end = {"outcome": "done", "tag": tag or (content_tag(data) if isinstance(data, bytes) else {})}
        except WriteConflictError:
            end = {"outcome": "refused"}
            raise
        finally:
            self._append(number, **end)
        return tag

    def delete(self, paths: Iterable[str]) -> None:
        """See `Backend`; recorded."""
        wanted = [*paths]
        for some in (wanted[start : start + PATHS_PER_LINE] for start in range(0, len(wanted), PATHS_PER_LINE)):
            number = self._begin(what="delete", paths=[self._folder + path for path in some])
            outcome = "unknown"
            try:
                self._backend.delete(some)
                outcome = "done"
            finally:
                self._append(number, outcome=outcome)

    def below(self, folder: str) -> "RecordingBackend":
        """See `Backend`."""
        below = self._backend.below(folder)
        return RecordingBackend(below, self._file, self._address, f"{self._folder}{folder}/")

    def _begin(self, **fields: Any) -> int:
        number = next(_NUMBERS)
        self._append(number, store=self._address, **fields)
        return number

    def _append(self, number: int, **fields: Any) -> None:
        host, at_ns = socket.gethostname(), time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        line = json.dumps({"id": number, "host": host, "pid": os.getpid(), "at_ns": at_ns} | fields)
        descriptor = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, line.encode() + b"\n")
        finally:
            os.close(descriptor)


def recorded_content(path: str, data: bytes) -> str | None:
    """Return what is recorded of a file's content; None: nothing."""
    try:
        text = _recorded_text(path, data)
    except (ValueError, LookupError, TypeError):
        return None
    return text if text is not None and len(json.dumps(text)) <= MAX_CONTENT else None


def _recorded_text(path: str, data: bytes) -> str | None:
    if _RECORD.fullmatch(path):
        return data.decode()
    if _ENTRY.fullmatch(path):
        actions = [json.loads(line) for line in data.decode().splitlines() if line.strip()]
        files = ((kind, each[kind]["path"]) for each in actions for kind in ("add", "remove") if kind in each)
        return "\n".join(json.dumps({kind: {"path": name}}) for kind, name in files) or "{}"
    if _JOURNAL.fullmatch(path):
        parts = json.loads(data)["parts"]
        return json.dumps({"parts": [f"{part['table']}/{part['path']}" for part in parts]})
    if _SEGMENT.fullmatch(path):
        return json.dumps([found[1].decode() for line in data.split(b"\n") if (found := _NAME.search(line))])
    return None
