"""Ranged reads of one object: few requests, one version, whole answers."""

from contextlib import nullcontext
from functools import partial

import pytest

from embedder.storage import object_ranges
from embedder.storage.object_ranges import ObjectRanges
from embedder.storage.object_stores import ObjectStoreError, named_errors

CONTENT = bytes(range(256)) * 40


class CountingStore:
    """A store in memory that keeps the ranges it was asked for."""

    def __init__(self, content: bytes = CONTENT) -> None:
        import obstore
        from obstore.store import MemoryStore

        self.store, self.ranges = MemoryStore(), []
        obstore.put(self.store, "a", content)

    def head(self, path):
        return self.store.head(path)

    def get(self, path, options):
        self.ranges.append(options["range"])
        return self.store.get(path, options=options)


@pytest.mark.parametrize("policy", [{}, {"tail_bytes": 100}, {"tail_bytes": 1 << 20}, {"ahead_bytes": 256}])
@pytest.mark.parametrize("piece_bytes", [7, 16 << 20])
def test_every_policy_reads_the_same_bytes(monkeypatch, policy, piece_bytes):
    monkeypatch.setattr(object_ranges, "PIECE_BYTES", piece_bytes)
    ranges = ObjectRanges(CountingStore(), "a", nullcontext, **policy)
    size = len(CONTENT)
    for offset, length in (
        (0, 10),
        (5, 300),
        (size - 5, 10),
        (size, 1),
        (0, size),
        (200, 200),
        (3, 0),
        (size - 150, 100),
    ):
        assert ranges.read_at(offset, length) == CONTENT[offset : offset + length]


def test_the_end_is_read_once_and_small_steps_share_a_block():
    store = CountingStore()
    ranges = ObjectRanges(store, "a", nullcontext, tail_bytes=100)
    for offset in range(len(CONTENT) - 100, len(CONTENT), 10):
        ranges.read_at(offset, 10)
    assert store.ranges == [(len(CONTENT) - 100, len(CONTENT))]
    store = CountingStore()
    ranges = ObjectRanges(store, "a", nullcontext, ahead_bytes=256)
    for offset in range(0, 512, 16):
        ranges.read_at(offset, 16)
    assert store.ranges == [(0, 256), (256, 512)]


def test_an_empty_object_costs_no_read():
    store = CountingStore(b"")
    assert ObjectRanges(store, "a", nullcontext, tail_bytes=100).read_at(0, 10) == b""
    assert store.ranges == []


def test_an_object_that_is_replaced_is_an_error_of_the_callers_choice():
    import obstore

    for named, kind in ((nullcontext, OSError), (partial(named_errors, "s3://team/a"), ObjectStoreError)):
        store = CountingStore()
        ranges = ObjectRanges(store, "a", named)
        obstore.put(store.store, "a", CONTENT[::-1])
        with pytest.raises(kind, match="replaced while it was read"):
            ranges.read_at(0, 10)


def test_a_short_answer_is_passing_trouble():
    class ShortStore(CountingStore):
        def get(self, path, options):
            start, stop = options["range"]
            return super().get(path, {**options, "range": (start, stop - 1)})

    with pytest.raises(ObjectStoreError, match="9 bytes came of 10") as caught:
        ObjectRanges(ShortStore(), "a", nullcontext).read_at(0, 10)
    assert (caught.value.kind, caught.value.transient) == ("Truncated", True)
