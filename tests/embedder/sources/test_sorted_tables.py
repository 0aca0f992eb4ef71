"""Rows that are sorted in runs on disk: the same as in memory, a piece of each in memory."""

import random

import pyarrow as pa
import pytest

from embedder.sources import sorted_tables
from embedder.sources.sorted_tables import SortedTables


def rows(seed):
    chance = random.Random(seed)
    names = [f"{chance.choice(['', 'a', 'ab', 'é', '😀', 'z'])}{chance.randrange(40)}" for _ in range(500)]
    return pa.table({"stem": names, "path": [f"{name}.{chance.randrange(9)}" for name in names], "size": range(500)})


@pytest.mark.parametrize("run_bytes", [1, 3000, 1 << 30])
def test_runs_are_merged_into_the_order_of_their_columns(run_bytes, monkeypatch):
    monkeypatch.setattr(sorted_tables, "PIECE_ROWS", 7)
    monkeypatch.setattr(sorted_tables, "RUN_BYTES", run_bytes)
    tables = [rows(1).slice(start, 50) for start in range(0, 500, 50)]
    found = SortedTables(iter(tables), ("stem", "path"))
    for _ in range(2):  # as often as they are asked for
        pieces = list(found.pieces())
        keys = [(row["stem"], row["path"]) for piece in pieces for row in piece.to_pylist()]
        assert keys == sorted(zip(*(rows(1)[name].to_pylist() for name in ("stem", "path")), strict=True))
        assert max(piece.num_rows for piece in pieces) <= 7 * 10
    sizes = sorted(row["size"] for piece in pieces for row in piece.to_pylist())
    assert sizes == list(range(500))


def test_no_rows_are_no_pieces(monkeypatch):
    assert list(SortedTables([], ("stem",)).pieces()) == []
    monkeypatch.setattr(sorted_tables, "RUN_BYTES", 0)
    assert list(SortedTables([rows(1).slice(0, 0)], ("stem",)).pieces()) == []
