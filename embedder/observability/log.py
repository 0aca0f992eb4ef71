"""The product's messages, sent by the standard `logging`: where they go, and the log of one run."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from embedder.errors import StoreError
from embedder.redaction import mask
from embedder.storage.printable import printable
from embedder.store.layout import utc_now
from embedder.store.store_errors import StoreUnavailableError

LOGGERS = tuple(logging.getLogger(name) for name in ("embedder", "shards", "index"))
UNWRITABLE = (OSError, StoreError, StoreUnavailableError)
"""Errors of a disk or a store that is full, missing or read-only."""


@contextmanager
def messages_to(handler: logging.Handler) -> Iterator[None]:
    """Send the product's messages to a handler inside the block, whatever level the program has set."""
    levels = [logger.level for logger in LOGGERS]
    for logger in LOGGERS:
        logger.addHandler(handler)
        if not logger.isEnabledFor(logging.INFO):
            logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for logger, level in zip(LOGGERS, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)


class RunLog(logging.Handler):
    """Handler that collects lines with the time, and writes them as soon as it has a destination.

    It masks secrets and keeps each message on one line, so no name or caption can forge another line. `problem` says
    why lines could not be written; None if they could.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Begin a log; lines are appended to the file `path` at once, or wait for `write_to`."""
        super().__init__()
        self.problem: str | None = None
        self._path = path
        self._write: Callable[[str], None] | None = self._append if path else None
        self._waiting = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Add the line of a message."""
        self.add(record.getMessage())

    def add(self, message: str) -> None:
        """Add a line that only goes to this log."""
        now = utc_now().strftime("%Y-%m-%dT%H:%M:%SZ")
        self._waiting += f"{now} {printable(mask(message))}\n"
        self._flush()

    def write_to(self, write: Callable[[str], None]) -> None:
        """Set what receives the waiting and all later lines; ignored if there is a path."""
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
            # A full disk must not end a run that would survive it; reported once, at the end.
            self.problem = f"the log can't be written ({getattr(error, 'strerror', None) or error})"

    def _append(self, lines: str) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(lines)
