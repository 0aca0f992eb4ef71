"""Items whose rows are not what their records say are found, in memory and by parts, and no others."""

import numpy as np
import pyarrow as pa
import pytest

from embedder.storage.hashed_rows import HashedRows
from embedder.store.tables.item_rows import RECORD_KEYS, ROW_KEYS, compare, mismatches


def records(*rows):
    return pa.Table.from_pylist([dict(zip(RECORD_KEYS.names, row, strict=True)) for row in rows], schema=RECORD_KEYS)


def keys(*rows):
    return pa.Table.from_pylist([dict(zip(ROW_KEYS.names, row, strict=True)) for row in rows], schema=ROW_KEYS)


def found(items, rows):
    """(records, expected, rows, segments) by id."""
    return {row["item_id"]: tuple(row.values())[2:] for row in compare(items, rows).to_pylist()}


def test_an_item_that_stands_once_with_its_rows_is_sound():
    items = records(("a", "embedded", 1), ("video", "embedded", 2), ("bad", "rejected", 0), ("kept", "rejected", 1))
    rows = keys(("a", 0), ("video", 1), ("video", 0), ("kept", 0))
    assert found(items, rows) == {}
    assert found(items.slice(0, 0), rows.slice(0, 0)) == {}


def test_each_kind_of_mismatch_is_found():
    items = records(
        ("none", "embedded", 1), ("part", "embedded", 3), ("more", "embedded", 1), ("two", "embedded", 1),
        ("two", "embedded", 1), ("double", "embedded", 2), ("reject", "rejected", 2), ("gone", "left_out", 0),
    )  # fmt: skip
    rows = keys(
        ("part", 0), ("part", 1), ("more", 0), ("more", 1), ("two", 0), ("double", 0), ("double", 0), ("own", 0)
    )
    assert found(items, rows) == {
        "none": (1, 1, 0, 0),
        "part": (1, 3, 2, 2),
        "more": (1, 1, 2, 2),
        "two": (2, 1, 1, 1),
        "double": (1, 2, 2, 1),
        "reject": (1, 2, 0, 0),
        "own": (0, None, 1, 1),
    }


def test_a_record_that_tells_no_number_needs_a_row_where_it_is_embedded():
    items = records(("a", "embedded", None), ("b", "embedded", None), ("c", "rejected", None), ("d", "rejected", None))
    assert found(items, keys(("a", 0), ("a", 1), ("c", 0))) == {"b": (1, None, 0, 0)}


@pytest.mark.parametrize("memory_bytes", [None, 1000])
def test_by_parts_the_same_is_found_as_of_the_whole(memory_bytes):
    numbers = np.random.default_rng(0).permutation(5000)
    items = records(*((f"{number:05d}", "embedded", 1) for number in numbers))
    rows = keys(*((f"{number:05d}", 0) for number in numbers[::-1] if number % 500))
    hashed = (
        HashedRows([table.slice(start, 100) for start in range(0, 5000, 100)], table.schema, memory_bytes=memory_bytes)
        for table in (items, rows)
    )
    parts = list(mismatches(*hashed))
    assert len(parts) == (1 if memory_bytes is None else 256)
    assert sorted(pa.concat_tables(parts)["item_id"].to_pylist()) == [f"{number:05d}" for number in range(0, 5000, 500)]
