"""Rows that a search may find, for FAISS and for our own searches."""

from functools import cached_property

import faiss
import numpy as np

from index.vectors import Among, Mask, Rows, count_among


class Selector:
    """Rows that a search may find."""

    def __init__(self, among: Among, num_total: int | None = None) -> None:
        """Take bool (rows,), whether each row may be found, or int64 (n,), the ascending rows that may be.

        Row numbers also need `num_total`, the number of all rows.
        """
        self.num_total = len(among) if num_total is None else num_total
        self.num_rows = count_among(among)
        self._among = among

    @cached_property
    def rows(self) -> Rows:
        """Rows that may be found, int64 (num_rows,), ascending."""
        return (
            np.flatnonzero(self._among) if self._among.dtype == np.bool_ else self._among.astype(np.int64, copy=False)
        )

    @cached_property
    def faiss(self) -> faiss.IDSelector:
        """FAISS's selector of the same rows; it keeps the bits alive, which FAISS doesn't copy."""
        mask: Mask = np.zeros(self.num_total, np.bool_)
        if self._among.dtype == np.bool_:
            mask = self._among.astype(np.bool_, copy=False)
        else:
            mask[self.rows] = True
        return faiss.IDSelectorBitmap(np.packbits(mask, bitorder="little"))
