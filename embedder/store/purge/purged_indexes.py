"""Search for index versions with data of purged items: ids, also of masked rows, or vectors of their captions.

An index holds captions' vectors, as its recall is measured on them after each update; they have no id, so they are
searched by value. An item's caption may be there though it has no image, and none of its ids is.
"""

from collections.abc import Collection, Iterable

from embedder.store.arrow_tensors import unpack_vectors
from embedder.store.files import FileInfo, StoreFiles
from embedder.store.purge.audit import holds, is_among
from embedder.store.purge.id_matcher import ItemNames
from embedder.store.tables import RecordTable

IDS_FILE, QUERIES_FILE = "/ids.parquet", "/queries.npz"


def caption_vectors(files: StoreFiles, ids: Collection[str], paths: Iterable[str]) -> frozenset[bytes]:
    """Read the vectors of the items' captions, as bytes.

    Args:
        files: the store.
        ids: ids of the items.
        paths: part files of embeddings that hold them, relative to the table's folder.
    """
    table = RecordTable(files, "embeddings")
    found: set[bytes] = set()
    for path in paths:
        rows = table.read(["item_id", "text_embedding"], [path])
        vectors = rows["text_embedding"].filter(is_among(rows["item_id"], ids)).drop_null()
        found.update(vector.tobytes() for vector in unpack_vectors(vectors))
    return frozenset(found)


def holding_indexes(files: StoreFiles, names: ItemNames, vectors: frozenset[bytes]) -> set[str]:
    """Folders of the index versions that hold data of the items.

    Args:
        files: the store.
        names: the items.
        vectors: result of `caption_vectors`.
    """
    infos = [info for info in files.list("index") if info.path.endswith((IDS_FILE, QUERIES_FILE))]
    return {info.path.rpartition("/")[0] for info in infos if _holds(files, info, names, vectors)}


def _holds(files: StoreFiles, info: FileInfo, names: ItemNames, vectors: frozenset[bytes]) -> bool:
    if info.path.endswith(IDS_FILE):
        return holds(files, info, names)
    content = files.read(info.path) if vectors else b""  # uncompressed: it contains the bytes of the vectors
    return any(vector in content for vector in vectors)
