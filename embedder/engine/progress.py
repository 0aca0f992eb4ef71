"""Who looks on while a run works."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol


class RunWatcher(Protocol):
    """Whoever wants to see the run: a progress display, or nobody."""

    def say(self, message: str) -> None:
        """One line about what happens now."""

    def progress(self, num_items: int) -> AbstractContextManager[Callable[[int], None]]:
        """Show progress over so many items while the block runs; yields what to tell the number done."""
