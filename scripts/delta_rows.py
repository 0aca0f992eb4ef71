"""A table's rows as programs read them that know Delta Lake, and nothing of this store."""

from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem


def delta_rows(folder: str | Path, version: int | None = None, columns: list[str] | None = None) -> pa.Table:
    """Rows of a table on a disk; of its files, the log's sizes count.

    deltalake's own file system is a Python object: threads of Arrow that still let go of its buffers while the
    interpreter ends abort the process. Arrow's local one is none.
    """
    files = SubTreeFileSystem(str(folder), LocalFileSystem())
    return DeltaTable(folder, version=version).to_pyarrow_table(columns=columns, filesystem=files)
