"""The run log: messages of a run, line by line with the time, for a person to follow."""

from collections.abc import Callable
from pathlib import Path

from obstore.exceptions import BaseError

from embedder.errors import StoreError
from embedder.observability.redaction import mask
from embedder.storage.printable import printable
from embedder.store.errors import StoreUnavailableError
from embedder.store.layout import utc_now

UNWRITABLE = (OSError, BaseError, StoreError, StoreUnavailableError)
"""Errors of a disk or a store that is full, gone or read-only."""
Write = Callable[[str], None]
"""Receives lines, each with its end."""


class RunLog:
    """Collects lines, and writes them as soon as it knows where to.

    Secrets are masked, and a line stays one line: no name or caption in it can begin another.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Begin a log; lines are appended to the file `path` at once, or wait for `write_to`."""
        self.problem: str | None = None
        self._path = path
        self._write: Write | None = self._append if path else None
        self._waiting = ""

    def add(self, message: str) -> None:
        """Add a line."""
        now = utc_now().strftime("%Y-%m-%dT%H:%M:%SZ")
        self._waiting += f"{now} {printable(mask(message))}\n"
        self._flush()

    def write_to(self, write: Write) -> None:
        """Set where the lines go, unless there is a path: those that wait, and the later ones."""
        if self._path is None:
            self._write = write
            self._flush()

    def _flush(self) -> None:
        if self._write is None:
            return
        lines, self._waiting = self._waiting, ""
        try:
            self._write(lines)
        except UNWRITABLE as error:
            # A full disk must not end a run that would survive it; said once, at the end.
            self.problem = f"the log can't be written ({getattr(error, 'strerror', None) or error})"

    def _append(self, lines: str) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(lines)
