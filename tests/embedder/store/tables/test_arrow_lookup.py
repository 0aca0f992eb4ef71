"""Ids are found in a part file, and between its bounds, as a scan finds them."""

import random

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from embedder.storage.hashed_rows import hashes_of
from embedder.store.part_file import PartFile
from embedder.store.tables import arrow_lookup
from embedder.store.tables.arrow_lookup import KnownIds

NAMES = ["", "a", "a#1", "ab", "b", "z", "ä", "日本", "\U0001f600", "~"]


def known(ids):
    return KnownIds(pa.chunked_array([ids[:2], ids[2:]], pa.string()))


def test_whether_ids_lie_between_bounds_is_what_a_scan_says():
    chance = random.Random(3)
    for _ in range(50):
        ids = chance.sample(NAMES, 3)
        least, greatest = sorted(chance.choices(NAMES, k=2), key=str.encode)
        assert known(ids).any_between((least, greatest)) == any(least <= name <= greatest for name in ids)


def test_without_bounds_any_id_may_be_there():
    assert known(["b", "a"]).any_between(None)
    assert not known([]).any_between(None)
    assert not known([]).any_between(("a", "b"))


@pytest.mark.parametrize("few_ids", [0, 10_000])
@pytest.mark.parametrize("num_hashes", [1, 3, 1 << 63])
def test_rows_among_other_ids_are_those_of_a_scan(monkeypatch, few_ids, num_hashes):
    monkeypatch.setattr(arrow_lookup, "FEW_IDS", few_ids)
    monkeypatch.setattr(arrow_lookup, "hashes_of", lambda ids: hashes_of(ids) % np.uint64(num_hashes))
    chance = random.Random(5)
    for _ in range(20):
        ids, others = chance.sample(NAMES, 6), chance.choices([*NAMES, "other"], k=chance.randrange(6))
        sought, there = known(ids), pa.chunked_array([others], pa.string())
        assert sought.find_among(there).to_pylist() == [row for row, name in enumerate(ids) if name in others]
        assert sought.are_listed(there).to_pylist() == [name in ids for name in others]


def test_many_ids_are_looked_for_without_a_set_of_them_all(monkeypatch):
    ids = pa.array([f"{number:07d}" for number in range(200_000)])
    sought, there = KnownIds(ids), pa.chunked_array([["0199999", "none", "0000000", "0099999"]])
    sizes = []
    is_in = pc.is_in
    monkeypatch.setattr(pc, "is_in", lambda rows, value_set: (sizes.append(len(value_set)), is_in(rows, value_set))[1])
    assert sought.find_among(there).to_pylist() == [0, 99_999, 199_999]
    assert max(sizes) == 3


@pytest.mark.parametrize(
    ("stats", "bounds"),
    [
        ('{"numRecords": 2, "minValues": {"item_id": "a"}, "maxValues": {"item_id": "b"}}', ("a", "b")),
        ('{"numRecords": 2, "minValues": {}, "maxValues": {}}', None),  # as a purge leaves them
        ('{"numRecords": 2}', None),
        ('{"numRecords": 2, "minValues": {"item_id": "a"}, "maxValues": null}', None),
    ],
)
def test_the_bounds_of_a_part_file_are_those_of_its_statistics(stats, bounds):
    part = PartFile(table="items", path="p", num_rows=2, size_bytes=1, stats=stats, session="")
    assert part.id_range == bounds
