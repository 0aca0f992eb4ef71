"""Findings of a check: what was found where, which rule it breaks, and the remedy."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

import pyarrow as pa

from embedder.errors import StoreError
from embedder.storage.printable import printable
from embedder.store.store_errors import StoreUnavailableError
from index.index_errors import RetrievalError

Severity = Literal["error", "warning", "note"]
"""Error: readers or writers get something wrong, or nothing.

Warning: something is lost that they can do without. Note: unfinished work, and files that nothing needs.
"""

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
NUM_SHOWN = 5
"""Number of names that a finding lists."""
MAX_NAME = 200  # characters of one name

_ADDRESS = re.compile(r"^(?:store )?[^ ]*/[^ ]*: ")

Item = TypeVar("Item")


@dataclass(frozen=True)
class Finding:
    """One finding: `place` is relative to the store, `cure` is what to do, a command if there is one."""

    severity: Severity
    place: str
    found: str
    rule: str
    cure: str

    @property
    def text(self) -> str:
        """Return the whole finding in one line."""
        return f"{self.place}: {self.found}; {self.rule}; {self.cure}"


@dataclass(frozen=True)
class Unreadable:
    """Reason, in one clause, why something can't be read; `mistake` is the user's, with its own remedy, or None."""

    reason: str
    mistake: StoreError | None = None


def attempt(read: Callable[[], Item]) -> Item | Unreadable:
    """Read something, or return why it is missing or damaged; StoreUnavailableError if the server doesn't answer."""
    try:
        return read()
    except StoreUnavailableError:
        raise
    except FileNotFoundError:
        return Unreadable("it is missing")
    except StoreError as error:
        return Unreadable(_found_by(error), error)
    except RetrievalError as error:
        return Unreadable(_found_by(error))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, pa.ArrowException) as error:
        return Unreadable(printable(f"{type(error).__name__}: {error}", 4 * MAX_NAME))


def _found_by(error: Exception) -> str:
    """Return what an error message says was found, without the address before it and the remedy after it."""
    return _ADDRESS.sub("", str(error)).partition("; ")[0]


def format_names(names: Iterable[str], total: int | None = None) -> str:
    """List the first few names, and how many more there are; `total` is needed if not all are given."""
    known = list(names)
    rest = (len(known) if total is None else total) - min(len(known), NUM_SHOWN)
    first = ", ".join(printable(name, MAX_NAME) for name in known[:NUM_SHOWN])
    return f"{first} and {rest:,} more" if rest else first
