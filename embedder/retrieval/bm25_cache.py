"""Cache of BM25 indexes on this machine, beside the copies of vector indexes.

A folder is whole or not there, so several processes may build at once; a damaged one is built anew. Purging drops them
with the other copies, as they hold the words of captions.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from embedder.retrieval.bm25 import TOKENS, CaptionWords, build_bm25
from embedder.store.tables import RecordTable
from embedder.store_index.versions import MAX_KEPT_COPIES, cache_folder, drop_copies
from index.atomic_folder import whole_folder
from index.errors import RetrievalError

if TYPE_CHECKING:
    import bm25s  # type: ignore[import-untyped]

HASHES = "sha256.json"


def open_words(table: RecordTable, captions: pa.ChunkedArray) -> CaptionWords:
    """Open the BM25 index of one version's captions, from the cache where it is there.

    Args:
        table: the version.
        captions: its column, in the table's order.
    """
    folder = cache_folder() / f"words-{_name(table)}"
    bm25 = _load(folder)
    if bm25 is None:
        bm25 = build_bm25(captions)
        if bm25 is not None:
            _keep(folder, bm25)
    return CaptionWords(bm25, captions)


def _name(table: RecordTable) -> str:
    """Hash of the content: no two part files of a store have one name."""
    import bm25s

    content = [TOKENS, bm25s.__version__, table.files.address, table.paths()]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


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
    hashes = {}
    for path in sorted(folder.iterdir()):
        if path.name != HASHES:
            with path.open("rb") as file:
                hashes[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes
