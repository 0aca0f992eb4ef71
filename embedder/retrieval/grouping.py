"""The segments of one video as one hit."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

Rows = np.ndarray[Any, np.dtype[np.int64]]


class ItemRows:
    """Which rows belong to one item.

    Attributes:
        num_items: different items.
    """

    def __init__(self, item_ids: pa.ChunkedArray) -> None:
        """Number the items.

        Args:
            item_ids: of each row.
        """
        names = pc.unique(item_ids)
        self.num_items = len(names)
        self._items: Rows = pc.index_in(item_ids, value_set=names).to_numpy().astype(np.int64)
        self._by_item = np.argsort(self._items, kind="stable")
        self._starts = np.searchsorted(self._items[self._by_item], np.arange(self.num_items + 1))

    @property
    def has_groups(self) -> bool:
        """Whether any item has more than one row."""
        return self.num_items < len(self._items)

    def first_of_each(self, rows: Rows) -> Rows:
        """Places in `rows` where an item comes up for the first time."""
        _, first = np.unique(self._items[rows], return_index=True)
        places: Rows = np.sort(first)
        return places

    def others(self, row: int) -> Rows:
        """The other rows of the item that a row belongs to."""
        item = self._items[row]
        rows = self._by_item[self._starts[item] : self._starts[item + 1]]
        others: Rows = rows[rows != row]
        return others
