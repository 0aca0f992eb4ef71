"""Findings of a check: what was found where, which rule it breaks, and what cures it."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

import pyarrow as pa

from embedder.errors import StoreError
from embedder.storage.printable import printable
from embedder.store.errors import StoreUnavailableError
from index.errors import RetrievalError

Severity = Literal["error", "warning", "note"]
"""Error: readers or writers get something wrong, or nothing. Warning: something is lost that they can do without.
Note: work that is not finished, and files that nothing needs."""

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
NUM_SHOWN = 5
"""Names that a finding tells, of those that it is about."""
MAX_NAME = 200  # characters of one

_ADDRESS = re.compile(r"^(?:store )?[^ ]*/[^ ]*: ")

Item = TypeVar("Item")


@dataclass(frozen=True)
class Finding:
    """One finding.

    Attributes:
        severity: how bad it is.
        place: file, folder or table, relative to the store.
        found: what was found.
        rule: what is expected.
        cure: what to do; the command where there is one.
    """

    severity: Severity
    place: str
    found: str
    rule: str
    cure: str

    @property
    def text(self) -> str:
        """All of it in one line."""
        return f"{self.place}: {self.found}; {self.rule}; {self.cure}"


@dataclass(frozen=True)
class Unreadable:
    """Reason why something of the store can't be read.

    Attributes:
        reason: in one clause.
        mistake: the user's, whose message has a cure of its own; else None.
    """

    reason: str
    mistake: StoreError | None = None


def attempt(read: Callable[[], Item]) -> Item | Unreadable:
    """Read something of the store; where it is missing or damaged, give the reason.

    Raises:
        StoreUnavailableError: the server of the store does not answer, which says nothing about the store.
    """
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
    """What a message of a mistake says was found: without the address before it and the cure behind it."""
    return _ADDRESS.sub("", str(error)).partition("; ")[0]


def format_names(names: Iterable[str], total: int | None = None) -> str:
    """Write the first few of some names, and how many more there are.

    Args:
        names: all of them, or the first ones.
        total: how many there are, where not all are given.
    """
    known = list(names)
    rest = (len(known) if total is None else total) - min(len(known), NUM_SHOWN)
    first = ", ".join(printable(name, MAX_NAME) for name in known[:NUM_SHOWN])
    return f"{first} and {rest:,} more" if rest else first
