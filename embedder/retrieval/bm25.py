"""BM25 over the words of captions, built once for each published version and kept on this machine.

Source: Robertson and others' BM25 as `bm25s` has it (Lù, 2024): scores are computed when the index is built, so a query
only adds up columns.

Indexes are kept beside the copies of vector indexes. A folder is whole or not there, so several processes may build at
once; a damaged one is built anew. Purging drops them with the other copies, as they hold the words of captions.
"""

import hashlib
import json
import os
import re
import shutil
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.retrieval.flat_index import largest
from embedder.storage.user_cache import cache_folder
from embedder.store.tables import RecordTable
from embedder.store_index.versions import COPIES_FOLDER, MAX_KEPT_COPIES, drop_copies
from index.atomic_folder import hash_files, whole_folder
from index.errors import RetrievalError
from index.vectors import Mask, Rows

if TYPE_CHECKING:
    import bm25s  # type: ignore[import-untyped]


TOKENS = "NFKC, case folded, runs of word characters"  # in the name of a cached index: other rules need another
HASHES = "sha256.json"
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


def open_words(table: RecordTable, captions: pa.ChunkedArray) -> CaptionWords:
    """Open the BM25 index of one version's captions, from the cache where it is there.

    Args:
        table: the version.
        captions: its column, in the table's order.
    """
    import bm25s

    # A hash of the content: no two part files of a store have one name.
    content = [TOKENS, bm25s.__version__, table.files.address, table.paths()]
    folder = cache_folder(COPIES_FOLDER) / f"words-{hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]}"
    bm25 = _load(folder)
    if bm25 is None:
        bm25 = build_bm25(captions)
        if bm25 is not None:
            _keep(folder, bm25)
    return CaptionWords(bm25, captions)


def _load(folder: Path) -> "bm25s.BM25 | None":
    """Load the index of a folder; None where it isn't there or is damaged."""
    import bm25s

    if not folder.is_dir():
        return None
    try:
        if json.loads((folder / HASHES).read_bytes()) == _hashes(folder):
            os.utime(folder)  # the copies used last are kept
            return bm25s.BM25.load(folder, mmap=True)
    except (OSError, ValueError):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    return None


def _keep(folder: Path, bm25: "bm25s.BM25") -> None:
    try:
        with whole_folder(folder) as stage:
            bm25.save(stage, show_progress=False)
            (stage / HASHES).write_text(json.dumps(_hashes(stage)))
        drop_copies(MAX_KEPT_COPIES)
    except (RetrievalError, OSError):
        pass  # another process kept the same one meanwhile, or nothing can be written here; this process has its own


def _hashes(folder: Path) -> dict[str, str]:
    return hash_files(path for path in sorted(folder.iterdir()) if path.name != HASHES)
