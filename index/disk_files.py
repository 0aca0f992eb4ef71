"""Files of a version in parts: opened in place after their hashes are checked; linked into the next version."""

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import BinaryIO

import faiss
import numpy as np
import pyarrow as pa

from index import faiss_build
from index.checked_files import open_checked
from index.designs import parse_design
from index.disk_index import DiskIndex, DiskPart, MappedCodes
from index.ids import IDS_SCHEMA
from index.index_errors import RetrievalError
from index.manifest import TEMPLATE_NAME, Manifest, PartRecord

_IDS_ROWS = 1 << 18  # per batch


def read_parts(folder: Path, manifest: Manifest, samples: Mapping[str, str] | None = None) -> DiskIndex:
    """Open the index of a version; the vectors stay on disk. `samples` are as for `open_checked`.

    Raises a RetrievalError if a file is missing, altered or inconsistent with the manifest, and RuntimeError if FAISS
    does not know a file's format.
    """
    with open_checked(folder / TEMPLATE_NAME, manifest, 0, samples) as file:
        template = faiss_build.read(file)
    code_size = faiss.downcast_index(template.refine_index).sa_code_size()
    on_disk = parse_design(manifest.design).on_disk
    parts: list[DiskPart] = []
    check = partial(open_checked, manifest=manifest, read_once_bytes=0, samples=samples)
    for record in manifest.parts or ():
        first_row = sum(part.num_rows for part in parts)
        parts.append(_read_part(folder, check, record, first_row, code_size, on_disk=on_disk))
    return DiskIndex(template, parts)


def _read_part(
    folder: Path,
    check: Callable[[Path], BinaryIO],
    record: PartRecord,
    first_row: int,
    code_size: int,
    *,
    on_disk: bool,
) -> DiskPart:
    with check(folder / record.lists) as file:
        lists = faiss_build.read(file)
    with check(folder / record.codes) as codes:
        _check_size(codes, folder / record.codes, record.num_rows * code_size)
        mapped = MappedCodes(codes, code_size, on_disk=on_disk)
    with check(folder / record.places) as file:
        _check_size(file, folder / record.places, record.num_rows * np.dtype(np.uint32).itemsize)
        places = np.frombuffer(file.read(), np.uint32)
    if lists.ntotal != record.num_rows:
        raise RetrievalError(
            f"{folder / record.lists}: found {lists.ntotal:,} rows, and the manifest says {record.num_rows:,}; build "
            "the index again"
        )
    return DiskPart(record.number, first_row, lists, mapped, places)


def _check_size(file: BinaryIO, path: Path, expected: int) -> None:
    found = os.fstat(file.fileno()).st_size
    if found != expected:
        raise RetrievalError(
            f"{path}: found {found:,} bytes, and its rows take {expected:,} by the manifest; build the index again"
        )


def write_ids(folder: Path, parts: Iterable[PartRecord], ids: pa.Table) -> None:
    """Write the ids of the parts that have none in the folder yet."""
    first_row = 0
    for part in parts:
        path = folder / part.ids
        if not path.exists():
            with pa.ipc.new_file(path, IDS_SCHEMA) as writer:
                writer.write_table(ids.slice(first_row, part.num_rows), max_chunksize=_IDS_ROWS)
        first_row += part.num_rows


def read_ids(folder: Path, manifest: Manifest) -> pa.Table:
    """Map the ids of all rows, read on demand; raises a RetrievalError if a file is missing, altered or malformed."""
    tables = []
    for part in manifest.parts or ():
        path = folder / part.ids
        with open_checked(path, manifest, 0) as file:
            # The same file that was hashed; by now the path may name another one.
            mapped = f"/proc/self/fd/{file.fileno()}" if sys.platform == "linux" else str(path)
            try:
                table = pa.ipc.open_file(pa.memory_map(mapped)).read_all()
            except pa.ArrowInvalid as error:
                raise RetrievalError(f"{path}: {error}; build the index again") from None
        if table.schema != IDS_SCHEMA or table.num_rows != part.num_rows:
            raise RetrievalError(
                f"{path}: found {table.num_rows:,} rows of {', '.join(table.column_names)}, and the manifest says "
                f"{part.num_rows:,} of {', '.join(IDS_SCHEMA.names)}; build the index again"
            )
        tables.append(table)
    return pa.concat_tables(tables)


def link_files(previous: Path, folder: Path, names: Iterable[str]) -> None:
    """Link files of a version into another one, or copy them if the file system has no links."""
    for name in names:
        try:
            os.link(previous / name, folder / name)
        except OSError:  # another file system, or one without links
            shutil.copyfile(previous / name, folder / name)


def remove_files(index: DiskIndex, folder: Path) -> None:
    """Remove the files of an index that is discarded."""
    for name in (TEMPLATE_NAME, *(name for part in index.parts for name in part.record.names)):
        (folder / name).unlink(missing_ok=True)
