"""Interface of a display of a run's progress."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

ShowProgress = Callable[[int], AbstractContextManager[Callable[[int], None]]]
"""Function from the number of items to a block, which receives the number of items done each time that it changes."""


def no_progress(num_items: int) -> AbstractContextManager[Callable[[int], None]]:
    """Show nothing; a `ShowProgress`."""
    return nullcontext(lambda num_done: None)
