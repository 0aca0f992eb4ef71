"""Exact search over all images, streamed: each query's best rows, and the rank of its right item.

Legend: `Q` queries, `N` rows (images and video segments), `E` embedding size, `P` pairs of a query and a row.

An item counts once, by its best row, however many segments it has. If a query has several right items, the best one
counts, and the others are not counted as ahead of it. Ties count against the model: a wrong item that scores within
`TIE` of the right one ranks before it, so identical vectors find nothing.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from index.vectors import Floats, Mask

Ints = np.ndarray[Any, np.dtype[np.int64]]

# One vector at two places of a matrix product may differ by some 1e-7; duplicates must tie all the same.
TIE = 1e-6
MAX_SCORES = 1 << 24  # of one block: 64 MiB of float32


@dataclass(frozen=True)
class RelevantPairs:
    """Pairs of a query and a row; int64 (P,) each."""

    queries: Ints
    rows: Ints

    def within(self, start: int, stop: int) -> tuple[Ints, Ints, Ints]:
        """Pairs whose row is in a range: their positions, queries, and rows counted from `start`."""
        positions = np.flatnonzero((self.rows >= start) & (self.rows < stop))
        return positions, self.queries[positions], self.rows[positions] - start


@dataclass(frozen=True)
class ExactNeighbours:
    """Results of exact search.

    `scores`: float32 (Q, min(k, N)), cosines of the best rows, best first; `ranks`: int64 (Q,), number of wrong items
    before the best right one; the number of items if the query has none; `asked_scores`: float32 (P,), scores of the
    pairs given; -inf for a row of -1.
    """

    scores: Floats
    ranks: Ints
    asked_scores: Floats


def search_exactly(
    queries: Floats,
    blocks: Callable[[], Iterable[Floats]],
    items: Ints,
    right: RelevantPairs,
    k: int,
    asked: RelevantPairs,
) -> ExactNeighbours:
    """Compare every query with every row, twice: for the scores of the right rows, then for the items before them.

    `queries`, float32 (Q, E), are unit rows. `blocks` gives all N rows in order, float32 (n, E) at a time, the same
    each time; `items`, int64 (N,), the item of each, from 0. `right` has every row of every right item. `asked` are
    pairs whose scores are wanted, such as an index's hits; row -1 for none.
    """
    max_rows = max(1, MAX_SCORES // max(1, len(queries)))
    own, starts = _own_scores(queries, _split_blocks(blocks(), max_rows), right)
    best = np.full((len(queries), 0), -np.inf, np.float32)
    ahead = _ItemsAhead(len(queries), items, starts)
    asked_scores = np.full(len(asked.rows), -np.inf, np.float32)
    for start, vectors in _split_blocks(blocks(), max_rows):
        stop = start + len(vectors)
        scores = queries @ vectors.T
        positions, numbers, rows = asked.within(start, stop)
        asked_scores[positions] = scores[numbers, rows]
        best = _merge(best, scores, k)
        _, numbers, rows = right.within(start, stop)
        scores[numbers, rows] = -np.inf  # a right item never counts as ahead of another
        ahead.add(scores > (own - TIE)[:, None], items[start:stop])
    has_answer = np.isfinite(own)
    num_items = len(np.unique(items))
    return ExactNeighbours(best, np.where(has_answer, ahead.counts, num_items), asked_scores)


def right_rows(queries: Ints, right_items: Ints, items: Ints) -> RelevantPairs:
    """Pair each query, int64 (R,), with every row of its right item, int64 (R,); `items` is the item of each row."""
    order = np.argsort(items, kind="stable")
    first = np.searchsorted(items[order], right_items, "left")
    num_rows = np.searchsorted(items[order], right_items, "right") - first
    within = np.arange(num_rows.sum()) - np.repeat(np.cumsum(num_rows) - num_rows, num_rows)
    return RelevantPairs(np.repeat(queries, num_rows), order[np.repeat(first, num_rows) + within])


def _split_blocks(blocks: Iterable[Floats], max_rows: int) -> Iterator[tuple[int, Floats]]:
    """Yield blocks of at most `max_rows` rows, each with the number of its first row."""
    start = 0
    for block in blocks:
        for first in range(0, len(block), max_rows):
            part = block[first : first + max_rows]
            yield start, part
            start += len(part)


def _own_scores(queries: Floats, parts: Iterator[tuple[int, Floats]], right: RelevantPairs) -> tuple[Floats, Ints]:
    """Score of each query's best right row, -inf without one, and the first row of every part."""
    own = np.full(len(queries), -np.inf, np.float32)
    starts = []
    for start, vectors in parts:
        starts.append(start)
        _, numbers, rows = right.within(start, start + len(vectors))
        np.maximum.at(own, numbers, np.einsum("pe,pe->p", queries[numbers], vectors[rows]))
    return own, np.array(starts, np.int64)


def _merge(best: Floats, scores: Floats, k: int) -> Floats:
    """Best k of the scores so far and of a block, best first."""
    if best.shape[1] < k:
        is_more = scores.shape[1] > k
        return _sort(best, np.partition(scores, -k, axis=1)[:, -k:] if is_more else scores)[:, :k]
    numbers, rows = np.nonzero(scores > best[:, -1:])  # few, after the first blocks
    if len(numbers) == 0:
        return best
    width = np.bincount(numbers)
    position = np.arange(len(numbers)) - np.repeat(np.cumsum(width) - width, width)
    fresh = np.full((len(best), width.max()), -np.inf, np.float32)
    fresh[numbers, position] = scores[numbers, rows]
    return _sort(best, fresh)[:, :k]


def _sort(best: Floats, scores: Floats) -> Floats:
    return -np.sort(-np.hstack([best, scores]), axis=1)


class _ItemsAhead:
    """Counter of the items before each query's own: each once, even if its rows are in several parts."""

    def __init__(self, num_queries: int, items: Ints, starts: Ints) -> None:
        self.counts = np.zeros(num_queries, np.int64)
        part = np.searchsorted(starts, np.arange(len(items)), "right")
        num_items = int(items.max(initial=-1)) + 1
        first, last = np.full(num_items, len(starts) + 1), np.zeros(num_items, np.int64)
        np.minimum.at(first, items, part)
        np.maximum.at(last, items, part)
        split = np.flatnonzero(first < last)  # few: a clip's segments are written together
        self._slots = np.full(num_items, -1)
        self._slots[split] = np.arange(len(split))
        self._counted = np.zeros((num_queries, len(split)), np.bool_)

    def add(self, is_ahead: Mask, items: Ints) -> None:
        """Count a part: bool (Q, n), and the items of its rows, int64 (n,)."""
        order = np.argsort(items, kind="stable")
        found, firsts = np.unique(items[order], return_index=True)
        if len(found) < len(items):
            is_ahead = np.logical_or.reduceat(is_ahead[:, order], firsts, axis=1)
            slots = self._slots[found]
        else:
            slots = self._slots[items]
        is_split = slots >= 0
        if not is_split.any():
            self.counts += np.count_nonzero(is_ahead, axis=1)
            return
        self.counts += np.count_nonzero(is_ahead[:, ~is_split], axis=1)
        fresh = is_ahead[:, is_split] & ~self._counted[:, slots[is_split]]
        self.counts += np.count_nonzero(fresh, axis=1)
        self._counted[:, slots[is_split]] |= fresh
