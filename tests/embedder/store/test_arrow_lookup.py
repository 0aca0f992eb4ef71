"""Ids are found between the bounds of a part file as a scan finds them."""

import random

import pyarrow as pa
import pytest

from embedder.store.arrow_lookup import SortedIds
from embedder.store.journal import PartFile

NAMES = ["", "a", "a#1", "ab", "b", "z", "ä", "日本", "\U0001f600", "~"]


def test_ids_between_bounds_are_those_of_a_scan():
    chance = random.Random(3)
    for _ in range(50):
        ids = chance.sample(NAMES, 6)
        least, greatest = sorted(chance.choices(NAMES, k=2), key=str.encode)
        found = SortedIds(pa.chunked_array([ids[:2], ids[2:]])).between((least, greatest)).to_pylist()
        assert found == sorted((name for name in ids if least <= name <= greatest), key=str.encode)


def test_without_bounds_all_ids_may_be_there():
    ids = SortedIds(pa.chunked_array([["b", "a"]], pa.string()))
    assert ids.between(None).to_pylist() == ["a", "b"]
    assert len(SortedIds(pa.chunked_array([], pa.string())).between(("a", "b"))) == 0


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
