"""Interface of a display of a run's progress."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, runtime_checkable

from embedder.executors.bottleneck import OperatorView
from embedder.store.journal.journal import JournalEntry

ShowProgress = Callable[[int], AbstractContextManager[Callable[[int], None]]]
"""Function from the number of items to a block, which gets the number of items done whenever it changes.

The callable that the block yields may also be an `OperatorDisplay`.
"""


@runtime_checkable
class OperatorDisplay(Protocol):
    """Display that shows the operators of a run on Ray."""

    def show_operators(self, view: OperatorView) -> None:
        """Show the operators as they are now."""


@runtime_checkable
class JournalDisplay(Protocol):
    """Display that takes what write tasks have finished."""

    def show_entry(self, entry: JournalEntry) -> None:
        """Take a new entry of the journal."""


def show_operators(display: object, view: OperatorView) -> None:
    """Show operators on a display, if it can."""
    if isinstance(display, OperatorDisplay):
        display.show_operators(view)


def show_entry(display: object, entry: JournalEntry) -> None:
    """Show an entry of the journal on a display, if it can."""
    if isinstance(display, JournalDisplay):
        display.show_entry(entry)


def no_progress(num_items: int) -> AbstractContextManager[Callable[[int], None]]:
    """Show nothing; a `ShowProgress`."""
    return nullcontext(lambda num_done: None)
