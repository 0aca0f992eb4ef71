"""Which index versions hold anything of purged items: their ids, those of masked rows too, or their captions' vectors.

An index carries captions' vectors, for its recall is measured on them after each update; they bear no id, so they are
looked for by value. An item's caption may be there though it has no picture, and none of its ids is.
"""

from collections.abc import Iterable

import pyarrow as pa
import pyarrow.compute as pc

from embedder.steps.tensors import unpack_vectors
from embedder.store.file_scan import holds
from embedder.store.files import FileInfo, StoreFiles
from embedder.store.history import part_files
from embedder.store.item_names import ItemNames
from embedder.store.tables import RecordTable

IDS_FILE, QUERIES_FILE = "/ids.parquet", "/queries.npz"


def caption_vectors(files: StoreFiles, ids: Iterable[str]) -> frozenset[bytes]:
    """The vectors of the items' captions, in whatever part file they stand; as their bytes."""
    table, wanted = RecordTable(files, "embeddings"), pa.array(sorted(ids), pa.string())
    found: set[bytes] = set()
    for path in part_files(files, "embeddings"):
        is_theirs = pc.is_in(table.read(["item_id"], [path])["item_id"], value_set=wanted)
        if pc.any(is_theirs).as_py():
            vectors = table.read(["text_embedding"], [path])["text_embedding"].filter(is_theirs).drop_null()
            found.update(vector.tobytes() for vector in unpack_vectors(vectors))
    return frozenset(found)


def holding_indexes(files: StoreFiles, names: ItemNames, vectors: frozenset[bytes]) -> set[str]:
    """The folders of the index versions that hold something of the items."""
    infos = [info for info in files.list("index") if info.path.endswith((IDS_FILE, QUERIES_FILE))]
    return {info.path.rpartition("/")[0] for info in infos if _holds(files, info, names, vectors)}


def _holds(files: StoreFiles, info: FileInfo, names: ItemNames, vectors: frozenset[bytes]) -> bool:
    if info.path.endswith(IDS_FILE):
        return holds(files, info, names)
    content = files.read(info.path) if vectors else b""  # the file is not compressed: vectors stand in it as they are
    return any(vector in content for vector in vectors)
