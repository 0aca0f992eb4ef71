"""Divides a decode task's rows into tables, the same way each time that Ray runs the task.

When a node is lost, Ray decodes its block again. It fails if the task then makes another number of tables; and if the
tables held other rows, rows would be lost or duplicated. Yet meanwhile a file may have disappeared, or become readable.
So tables end at fixed items, whatever the earlier ones hold. A table that becomes too large sooner, which only videos
cause, ends where it is full; that place is noted outside the process before the table is passed on.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from embedder.compat import ray_attempts
from embedder.media.resize import max_bytes
from embedder.steps.item_decoder import DecodeSpec, Values

Position = tuple[int, int]
"""Number of an item in the listing, and of a row of that item."""

Row = tuple[int, Values]
"""Number of an item in the listing, and the values of one of its rows."""

COMPLETE = "complete"


def fixed_cuts(num_items: int, spec: DecodeSpec, table_bytes: int) -> list[Position]:
    """Return where tables always end: after whole batches that have `table_bytes` of pixels. Pure."""
    rules = {each.resize for each in spec.image_inputs if each.resize is not None}
    if not rules:
        return []
    num_batches = math.ceil(table_bytes / (sum(map(max_bytes, rules)) * spec.rows_per_batch))
    items_per_table = max(1, num_batches) * spec.rows_per_batch
    return [(number, 0) for number in range(items_per_table, num_items, items_per_table)]


def divide(
    rows: Iterable[Row],
    cuts: Sequence[Position],
    is_full: Callable[[int, int], bool],
    on_cut: Callable[[Position], Any] | None,
) -> Iterator[list[Row]]:
    """Divide rows, in listing order, into tables: one more than there are cuts, plus those that are full.

    Tables are empty if no rows are left. `cuts` are first positions of tables. `is_full` takes rows and bytes of pixels
    and says whether a table ends before the next row. `on_cut` gets the first position after a full table, before that
    is yielded; None: none is ever full.
    """
    due = deque(sorted(cuts))
    taken: list[Row] = []
    position, num_bytes = (-1, 0), 0
    for number, values in rows:
        position = (number, position[1] + 1 if number == position[0] else 0)
        while due and due[0] <= position:
            due.popleft()
            yield taken
            taken, num_bytes = [], 0
        if on_cut is not None and is_full(len(taken), num_bytes):
            on_cut(position)
            yield taken
            taken, num_bytes = [], 0
        taken.append((number, values))
        num_bytes += sum(value.nbytes for value in values.values() if getattr(value, "ndim", 0) > 1)
    yield taken
    for _ in due:
        yield []


class CutNotes:
    """Places where attempts of this Ray task ended full tables; outside Ray nothing is noted.

    `cuts` are those of earlier attempts; `is_complete` says whether one reached the end of the listing.
    """

    def __init__(self) -> None:
        is_task = ray_attempts.is_in_worker()
        self._prefix = f"{ray_attempts.job_id()}/cuts/{ray_attempts.task_id()}/" if is_task else None
        notes = ray_attempts.read_notes(self._prefix) if self._prefix and ray_attempts.attempt_number() else {}
        names = {key.rpartition("/")[2] for key in notes}
        self.is_complete = COMPLETE in names
        self.cuts: list[Position] = [_position(name) for name in names - {COMPLETE}]

    def add(self, position: Position) -> None:
        """Note that a full table ends before a position."""
        self.cuts.append(position)
        self._write("-".join(map(str, position)))

    def complete(self) -> None:
        """Note that the task has made all of its tables."""
        if not self.is_complete:
            self._write(COMPLETE)

    def _write(self, name: str) -> None:
        if self._prefix is not None:
            ray_attempts.write_note(self._prefix + name, "")


def _position(name: str) -> Position:
    number, _, row = name.partition("-")
    return int(number), int(row)


def repeatable_tables(rows: Iterable[Row], spec: DecodeSpec, num_items: int, table_bytes: int) -> Iterator[list[Row]]:
    """Divide the rows of a Ray task as its earlier attempts did, as far as they came."""
    notes = CutNotes()
    may_differ = False

    def watch_rows() -> Iterator[Row]:
        nonlocal may_differ
        for number, values in rows:
            may_differ |= values.get("error_type") is not None
            yield number, values

    def is_full(num_rows: int, num_bytes: int) -> bool:
        return num_rows > 0 and num_rows % spec.rows_per_batch == 0 and num_bytes >= table_bytes

    cuts = fixed_cuts(num_items, spec, table_bytes) + notes.cuts
    yield from divide(watch_rows(), cuts, is_full, None if notes.is_complete else notes.add)
    if notes.cuts or may_differ:  # next time, an item that couldn't be read may be a video
        notes.complete()
