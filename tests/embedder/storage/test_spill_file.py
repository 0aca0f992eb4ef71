"""Rows that are gathered in memory or on disk are taken by their numbers as from one table."""

import numpy as np
import pyarrow as pa
import pytest

from embedder.storage.spill_file import GatheredRows, in_memory_or_mapped

PIECES = [pa.table({"name": [f"{number:02d}" for number in range(start, start + 7)]}) for start in range(0, 42, 7)]


@pytest.mark.parametrize("memory_bytes", [0, 1 << 20], ids=["mapped", "in memory"])
@pytest.mark.parametrize(
    "rows", [[], [41], [0, 1, 2], [8, 8, 40, 8], [41, 0, 20, 6, 7, 21], list(range(41, -1, -1)), list(range(42))]
)
def test_rows_are_taken_in_the_order_asked_for(memory_bytes, rows, monkeypatch):
    monkeypatch.setattr("embedder.storage.spill_file.MEMORY_BYTES", memory_bytes)
    gathered = GatheredRows(in_memory_or_mapped(iter(PIECES), PIECES[0].schema))
    found = gathered.take(np.array(rows, np.int64))
    assert found.schema == PIECES[0].schema
    assert found["name"].to_pylist() == [f"{number:02d}" for number in rows]


def test_of_no_rows_none_are_taken():
    gathered = GatheredRows(in_memory_or_mapped(iter([]), PIECES[0].schema))
    assert (gathered.table.num_rows, gathered.take(np.array([], np.int64)).num_rows) == (0, 0)


def test_some_columns_are_taken_alone_and_in_the_order_asked_for():
    table = pa.table({"a": [1, 2, 3], "b": ["x", "y", "z"], "c": [0.5, 1.5, 2.5]})
    found = GatheredRows(pa.concat_tables([table, table])).take(np.array([5, 0, 4]), ["c", "a"])
    assert found.to_pydict() == {"c": [2.5, 0.5, 1.5], "a": [3, 1, 2]}
