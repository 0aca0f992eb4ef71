"""Purge of rows from a part file of whose rows some have left by deletion vectors: they are blanked where they lie.

Deletion vectors number the rows, so no row may move: purged rows become nulls, and every version that has the file
marks them. Versions mark them first: after a kill in between, the file still holds the items and is found again.
"""

from collections.abc import Collection, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.plugins.maintain.purge.audit import is_among
from embedder.store.files import StoreFiles
from embedder.store.journal.part_writer import encode_part
from embedder.store.part_file import PartFile
from embedder.store.publish.history import part_files
from embedder.store.schema import VECTOR_COLUMNS
from embedder.store.tables.deletion_vectors import (
    DeletionVector,
    marked_rows,
    marked_stats,
    store_vectors,
    vector_of,
    with_feature,
    with_property,
)
from embedder.store.tables.delta_log import LOG_FOLDER, Action, change_log, read_actions
from embedder.store.tables.tables import RecordTable
from index.vectors import Rows

Vectors = dict[str, set[DeletionVector | None]]


class BlankedPart(NamedTuple):
    """Part file with blanked rows: its entry for a log, its bytes, its content, and the rows."""

    part: PartFile
    data: bytes
    content: pa.Table
    rows: Rows


def find_vectors(files: StoreFiles, table: str, paths: Collection[str]) -> Vectors:
    """Return the deletion vectors that versions of a table have for some part files, without those that have none.

    Vectors whose file a vacuum deleted are left out: the versions with them can't be read, and their actions stay.
    """
    found: Vectors = {path: set() for path in paths}
    for log_path in _log_files(files, table):
        for action in read_actions(files, log_path)[0]:
            for kind in ("add", "remove"):
                own = action.get(kind)
                if own and own["path"] in found:
                    found[own["path"]].add(vector_of(own))
    there = part_files(files, table)
    return {
        path: {each for each in vectors if each is None or (each.file(table) or path) in there}
        for path, vectors in found.items()
        if vectors - {None}
    }


def blank(table: RecordTable, path: str, ids: Collection[str]) -> BlankedPart:
    """Return a part file with nulls in the place of some items' rows."""
    content = table.files.read_table(f"{table.name}/{path}")
    gone = is_among(content["item_id"], ids).to_numpy()
    content = content.take(pa.array(np.arange(len(gone)), mask=gone))
    part, data = encode_part(table.name, path, content, session="")
    is_blank = pc.is_null(content["item_id"]).to_numpy()  # by this purge or an earlier one that was cut off
    return BlankedPart(part, data, content, np.flatnonzero(is_blank))


def mark_blanked(files: StoreFiles, table: str, parts: Mapping[str, BlankedPart], vectors: Vectors) -> None:
    """Mark blanked rows in every version that has their part file, and record its new size and statistics."""
    restated: dict[tuple[str, DeletionVector | None], tuple[DeletionVector, str]] = {}
    for path, blanked in parts.items():
        for vector in sorted(vectors[path], key=str):
            num_stored = blanked.part.num_rows
            before = np.empty(0, np.int64) if vector is None else marked_rows(files, table, vector, num_stored)
            rows = np.union1d(before, blanked.rows)
            run_id = "-".join(path.split("-")[1:3])
            (new,) = store_vectors(files, table, run_id, "purge", {path: rows}).values()
            names = [name for name in VECTOR_COLUMNS if name in blanked.content.column_names]
            nulls = {name: blanked.content[name].take(pa.array(rows)).null_count for name in names}
            restated[path, vector] = new, marked_stats(blanked.part.stats, nulls)
    sizes = {path: blanked.part.size_bytes for path, blanked in parts.items()}
    for log_path in _log_files(files, table):
        change_log(files, log_path, partial(_restate, restated=restated, sizes=sizes))


def _restate(
    action: Action,
    restated: Mapping[tuple[str, DeletionVector | None], tuple[DeletionVector, str]],
    sizes: Mapping[str, int],
) -> Action:
    if action.get("protocol"):  # a version may have got its first deletion vector
        return action | {"protocol": with_feature(action["protocol"])}
    if action.get("metaData"):
        return action | {"metaData": with_property(action["metaData"])}
    for kind in ("add", "remove"):
        own = action.get(kind)
        if own and (own["path"], vector_of(own)) in restated:
            vector, stats = restated[own["path"], vector_of(own)]
            fields = {"deletionVector": vector.action(), "stats": stats, "size": sizes[own["path"]]}
            parsed = {"stats_parsed": None} if "stats_parsed" in own else {}
            return action | {kind: own | (fields if kind == "add" else {"deletionVector": vector.action()}) | parsed}
    return action


def _log_files(files: StoreFiles, table: str) -> list[str]:
    found = [info.path for info in files.list(f"{table}/{LOG_FOLDER}")]
    return [path for path in found if path.endswith((".json", ".parquet"))]
