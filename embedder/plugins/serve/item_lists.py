"""Lists of a publication's items in an order without a query: the newest first, by name, at random."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.plugins.serve.api_schema import Sort
from embedder.plugins.serve.served_publication import ServedPublication
from embedder.retrieval.hit import Hit
from embedder.retrieval.ranking import RowNumbers, row_numbers
from index.vectors import Rows

T = TypeVar("T")
FIELDS: dict[str, tuple[str, str]] = {
    "newest": ("file_date", "descending"),
    "oldest": ("file_date", "ascending"),
    "embedded": ("embedded_at", "descending"),
}
MAX_REMEMBERED = 12


def list_items(publication: ServedPublication, where: str | None, sort: Sort, seed: int) -> Rows:
    """Rows of the items that can be found and fulfil a condition; of each item, the first such row.

    The condition must have been evaluated before; None means all items. Items that are equal in the order are sorted by
    id; `seed` is for the random order.
    """
    rows = _order_rows(publication, sort, seed)
    rows = rows[publication.store.searcher.snapshot.is_found[rows]]  # no reject that has a caption
    if where is not None:
        rows = rows[publication.store.searcher.snapshot.metadata.filter.matching(where)[rows]]
    _, first = np.unique(publication.item_numbers[rows], return_index=True)
    return rows[np.sort(first)].astype(np.int64)


def describe_items(publication: ServedPublication, rows: Rows) -> list[Hit]:
    """Make hits from rows that were not searched for."""
    described = publication.store.searcher.snapshot.metadata.describe(rows)
    return [Hit(score=float("nan"), **each) for each in described]


def sorted_hits(publication: ServedPublication, hits: list[Hit], sort: Sort) -> list[Hit]:
    """Put hits into another order than that of their scores."""
    rows = _order_rows(publication, sort, 0)
    numbers = {hit.item_id: int(publication.rows_of(hit.item_id)[0]) for hit in hits}
    places = np.empty(len(rows), np.int64)
    places[rows] = np.arange(len(rows))
    return sorted(hits, key=lambda hit: (places[numbers[hit.item_id]], hit.segment))


def _order_rows(publication: ServedPublication, sort: Sort, seed: int) -> RowNumbers:
    """All rows in an order, remembered."""
    key = (sort, seed if sort == "random" else 0)
    return remember(publication.orders, key, lambda: _order(publication, sort, seed), MAX_REMEMBERED)


def remember(known: dict[Any, T], key: Any, make: Callable[[], T], max_known: int) -> T:
    """Return what is known under a key, or make it, and forget the oldest; other threads do the same meanwhile."""
    with suppress(KeyError):
        return known[key]
    made = make()
    for oldest in tuple(known)[: 1 - max_known]:
        known.pop(oldest, None)
    known[key] = made
    return made


def _order(publication: ServedPublication, sort: Sort, seed: int) -> RowNumbers:
    metadata = publication.store.searcher.snapshot.metadata
    rows = metadata.rows.select(["item_id", "segment"])
    keys = [("item_id", "ascending"), ("segment", "ascending")]
    if sort == "random":
        numbers = publication.item_numbers
        shuffled = np.random.default_rng(seed).permutation(int(numbers.max(initial=-1)) + 1)
        rows, keys = rows.append_column("place", pa.array(shuffled[numbers])), [("place", "ascending"), *keys]
    elif sort in FIELDS:
        name, direction = FIELDS[sort]
        if name in metadata.filter.columns:
            rows = rows.append_column("place", metadata.filter.read([name])[name])
            keys = [("place", direction), *keys]
    order = pc.sort_indices(rows, sort_keys=keys).to_numpy()  # those without a value last
    ordered = row_numbers(len(order), len(order))
    ordered[:] = order
    return ordered
