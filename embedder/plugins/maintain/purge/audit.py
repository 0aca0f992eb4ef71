"""Search of all files of a store for some items, by kind of file."""

import zlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from io import BytesIO
from typing import Any
from zipfile import BadZipFile

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.errors import StoreError
from embedder.plugins.maintain.purge.id_matcher import ItemNames
from embedder.storage.hashed_rows import DUPLICATE
from embedder.store.backends import FileInfo
from embedder.store.files import StoreFiles
from embedder.store.journal.runs import RUN_FILE
from embedder.store.layout import CURRENT_FILE, PUBLISHED_FILE, STORE_FILE
from embedder.store.publish.query_towers import is_tower_file
from embedder.store.publish.tombstones import PURGED_FILE
from embedder.store.tables.arrow_tensors import Array, unpack_vectors
from embedder.store.tables.deletion_vectors import is_vector_file
from embedder.store.tables.delta_log import LOG_FOLDER
from embedder.store.tables.tables import RecordTable
from shards.file_schema import parse_json

RECORDS = (
    STORE_FILE,
    CURRENT_FILE,
    PURGED_FILE,
    PUBLISHED_FILE,
    RUN_FILE,
    "manifest.json",
    "_last_checkpoint",
    ".lock",
)
"""Files with fixed keys, without an item's name or text; a word in them that equals an id is not the item."""

NUMBERS = (".faiss", ".npy", ".npz", ".codes", ".u8", ".u16", ".u32", ".u64")
"""Index files with only numbers; the ids are in other files."""


def is_free_text(info: FileInfo) -> bool:
    """Return whether a file is prose or JSON, in which names can be replaced."""
    name = info.path.rpartition("/")[2]
    if is_tower_file(info.path) or is_vector_file(info.path):
        return False
    is_table = name.endswith((".parquet", ".arrow", *NUMBERS))
    return f"/{LOG_FOLDER}/" not in info.path and not is_table and name not in RECORDS


def is_checksum(info: FileInfo) -> bool:
    """Return whether a file lies beside the entries of a log, as Spark's `.crc` of a version, which nobody needs."""
    return f"/{LOG_FOLDER}/" in info.path and not info.path.endswith((".json", ".parquet", "_last_checkpoint"))


@dataclass(frozen=True)
class Scan:
    """Result of a search of the whole store; `found_in` are the files that name or hold one of the items."""

    num_files: int
    num_parquet: int
    size_bytes: int
    found_in: tuple[str, ...]


def scan_store(files: StoreFiles, names: ItemNames) -> Scan:
    """Search every file of the store."""
    infos = list(files.list(""))
    found = files.each(lambda info: names_in(files, info, names), infos)
    return Scan(
        num_files=len(infos),
        num_parquet=sum(info.path.endswith(".parquet") for info in infos),
        size_bytes=sum(info.size_bytes for info in infos),
        found_in=tuple(info.path for info, named in zip(infos, found, strict=True) if named),
    )


def names_in(files: StoreFiles, info: FileInfo, names: ItemNames) -> frozenset[str]:
    """Return the ids and URIs of items that a file names or has rows of; StoreError if it is damaged."""
    name = info.path.rpartition("/")[2]
    if name in RECORDS or name.endswith(NUMBERS) or is_tower_file(info.path) or is_vector_file(info.path):
        return frozenset()
    if name.endswith((".parquet", ".arrow")):
        rows = _read_rows(files, info)
        if "item_id" in rows.column_names:
            ids = rows["item_id"].cast(pa.string())
            return frozenset(pc.unique(ids.filter(is_among(ids, names.ids))).to_pylist())
        values: Iterable[Any] = rows.to_pylist()
    else:
        values = texts_of(files.read(info.path))
    if f"/{LOG_FOLDER}/" in info.path and not is_checksum(info):
        values = (row_values(action) for action in values)
    return frozenset().union(*map(names.found_in, values))


def _read_rows(files: StoreFiles, info: FileInfo) -> pa.Table:
    """Read the ids of a Parquet or Arrow file, or all rows if it has none (a checkpoint)."""
    try:
        if info.path.endswith(".arrow"):
            return pa.ipc.open_file(pa.BufferReader(files.read(info.path))).read_all()
        ids = files.read_table(info.path, ["item_id"])
        return ids if ids.column_names else files.read_table(info.path)
    except (OSError, pa.ArrowException) as error:
        raise StoreError(
            f"{files.uri(info.path)}: can't be read ({error}), so its content is unknown; restore the file, or "
            "delete it where nothing needs it"
        ) from None


def caption_vectors(files: StoreFiles, ids: Collection[str], paths: Iterable[str]) -> frozenset[bytes]:
    """Return the vectors of the items' captions, as bytes of their values in half precision.

    `files` may be a model's view; `paths` are the embeddings' part files with the items, relative to the table's
    folder.
    """
    table = RecordTable(files, "embeddings")
    found: set[bytes] = set()
    if table.schema is None or "text_embedding" not in table.schema.names:  # other models may have no vectors
        return frozenset()
    for path in paths:
        rows = table.read_stored(path, ["item_id", "text_embedding"])
        vectors = rows["text_embedding"].filter(is_among(rows["item_id"], ids)).drop_null()
        found |= _half_bytes(unpack_vectors(vectors))
    return frozenset(found)


def may_hold(content: bytes, vectors: Collection[bytes]) -> bool:
    """Return whether the queries of an index have one of some vectors, given in half precision; damaged ones may.

    An index keeps its float32 vectors when those of the table are rounded, so both are compared rounded.
    """
    try:
        with np.load(BytesIO(content), allow_pickle=False) as arrays:
            return any(
                array.ndim == 2 and array.dtype == np.float32 and not _half_bytes(array).isdisjoint(vectors)
                for array in arrays.values()
            )
    except (OSError, ValueError, EOFError, LookupError, NotImplementedError, BadZipFile, zlib.error):
        return True


def _half_bytes(vectors: Array) -> set[bytes]:
    with np.errstate(over="ignore"):
        return {vector.tobytes() for vector in vectors.astype(np.float16)}


def is_among(ids: pa.ChunkedArray, wanted: Collection[str]) -> pa.ChunkedArray:
    """Return a mask of the ids that are among `wanted`, or were such before a listing made them unique."""
    ids, values = ids.cast(pa.string()), pa.array(list(wanted), pa.string())
    listed = pc.replace_substring_regex(ids, rf"{DUPLICATE}\d+$", "")
    return pc.or_(pc.is_in(ids, value_set=values), pc.is_in(listed, value_set=values))


def row_values(action: Any) -> list[Any]:
    """Return the row values in an action of a Delta log (entry or checkpoint): file bounds and predicates.

    The rest is paths and columns, in which a word that equals an id is not the item.
    """
    if not isinstance(action, dict):
        return [action]
    stats = [(action.get(kind) or {}).get("stats") for kind in ("add", "remove")]
    parameters = (action.get("commitInfo") or {}).get("operationParameters") or {}
    return [*stats, *(value for name, value in parameters.items() if "predicate" in name.lower())]


def texts_of(content: bytes) -> list[Any]:
    """Parse a text file as one JSON value, else line by line, each as JSON if possible."""
    text = content.decode(errors="replace")
    value = _value(text)
    return [_value(line) for line in text.removesuffix("\n").split("\n")] if value is text else [value]


def _value(line: str) -> Any:
    try:
        return parse_json(line)
    except ValueError:
        return line
