"""BM25 over the words of captions, built once for each published version and kept on this machine.

Source: Robertson and others' BM25 as `bm25s` has it (Lù, 2024): scores are computed when the index is built, so a query
only adds up columns.
"""

import re
import unicodedata
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.retrieval.flat_index import largest
from index.vectors import Mask, Rows

if TYPE_CHECKING:
    import bm25s  # type: ignore[import-untyped]


TOKENS = "NFKC, case folded, runs of word characters"  # in the name of a cached index: other rules need another
_WORD = re.compile(r"\w+")


def words_in(text: str) -> list[str]:
    """Words of a text; those that differ only in case or in the form of their characters are equal."""
    return _WORD.findall(unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold()))


class CaptionWords:
    """Ranking of rows by the words of their captions; safe for several threads."""

    def __init__(self, bm25: "bm25s.BM25 | None", captions: pa.ChunkedArray) -> None:
        """Join an index with the rows that it was built of.

        Args:
            bm25: of the captions that are there; None where no caption holds a word.
            captions: of each row of the table; may be null.
        """
        self._bm25 = bm25
        self._rows: Rows = np.flatnonzero(pc.is_valid(captions).to_numpy())

    def ranking(self, text: str, depth: int, among: Mask) -> Rows:
        """Rows whose captions fit a text best, best first; only those that hold one of its words.

        Args:
            text: the query.
            depth: most rows.
            among: bool (rows of the table,), the rows allowed.
        """
        if self._bm25 is None:
            return np.empty(0, np.int64)
        known = self._bm25.get_tokens_ids(words_in(text))
        if not known:
            return np.empty(0, np.int64)
        scores = self._bm25.get_scores_from_ids(known)
        fitting = np.flatnonzero(scores > 0)
        fitting = fitting[among[self._rows[fitting]]]
        best: Rows = self._rows[fitting[largest(scores[fitting], depth)]]
        return best


def build_bm25(captions: pa.ChunkedArray) -> "bm25s.BM25 | None":
    """Build an index of the captions; None where no caption holds a word."""
    import bm25s
    from bm25s.tokenization import Tokenized  # type: ignore[import-untyped]

    numbers: dict[str, int] = {}
    documents = [
        [numbers.setdefault(word, len(numbers)) for word in words_in(caption)]
        for chunk in captions.drop_null().chunks
        for caption in chunk.to_pylist()
    ]
    if not numbers:
        return None
    bm25 = bm25s.BM25()
    bm25.index(Tokenized(ids=documents, vocab=numbers), show_progress=False)
    return bm25
