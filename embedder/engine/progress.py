"""Interface of the display of a run."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol


class RunWatcher(Protocol):
    """Display of a run: lines and progress."""

    def say(self, message: str) -> None:
        """Show one line."""

    def progress(self, num_items: int) -> AbstractContextManager[Callable[[int], None]]:
        """Show progress while the block runs; yields a function that takes the number of items done."""
