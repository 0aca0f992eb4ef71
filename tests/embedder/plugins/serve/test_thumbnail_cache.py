"""Thumbnails on disk stay within their bytes, and those of items that left the store are gone at once."""

import pyarrow as pa
import pytest

from embedder.plugins.serve.thumbnails import ThumbnailCache, ThumbnailKey
from embedder.retrieval.row_metadata import IdRows

MAX_BYTES = 300


def ids(*names):
    return IdRows(pa.chunked_array([list(names)], pa.string()))


@pytest.fixture
def cache(tmp_path):
    made = ThumbnailCache(tmp_path / "cache", MAX_BYTES)
    made.keep_only(ids("a", "b", "c/../d"))
    return made


def files(tmp_path):
    return sorted(path.read_bytes() for path in (tmp_path / "cache").rglob("*") if path.is_file())


def test_what_was_kept_is_found_under_its_own_name(cache):
    for item_id in ("a", "c/../d"):
        cache.put(ThumbnailKey(item_id, "1"), item_id.encode())
    assert cache.get(ThumbnailKey("a", "1")) == b"a"
    assert cache.get(ThumbnailKey("c/../d", "1")) == b"c/../d"
    assert cache.get(ThumbnailKey("a", "2")) is None


def test_the_least_recently_used_go_when_there_are_too_many_bytes(cache, tmp_path):
    for name in "1234":
        if name == "4":
            cache.get(ThumbnailKey("a", "1"))
        cache.put(ThumbnailKey("a", name), name.encode() * 100)
    assert [cache.get(ThumbnailKey("a", name)) is not None for name in "1234"] == [True, False, True, True]
    assert len(files(tmp_path)) == 3
    assert cache.num_bytes == MAX_BYTES
    cache.put(ThumbnailKey("a", "large"), bytes(MAX_BYTES + 1))
    assert cache.get(ThumbnailKey("a", "large")) is None


def test_an_item_that_left_the_store_is_gone_and_does_not_come_back(cache, tmp_path):
    for item_id in "ab":
        cache.put(ThumbnailKey(item_id, "1"), item_id.encode())
    cache.keep_only(ids("b"))
    cache.put(ThumbnailKey("a", "2"), b"rendered while it left")
    assert cache.get(ThumbnailKey("a", "1")) is cache.get(ThumbnailKey("a", "2")) is None
    assert files(tmp_path) == [b"b"]
    assert cache.num_bytes == 1


class CountedId(str):
    """Id that counts how often any is compared."""

    __slots__ = ()
    num_compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other):
        CountedId.num_compared += 1
        return str.__eq__(self, other)


def test_of_many_items_that_leave_at_once_none_is_compared_with_all(cache, tmp_path):
    names = [CountedId(number) for number in range(100)]
    cache.keep_only(ids(*names))
    for name in names:
        cache.put(ThumbnailKey(name, "1"), b"1")
    assert len(files(tmp_path)) == len(names)
    CountedId.num_compared = 0
    cache.keep_only(ids("a"))
    assert files(tmp_path) == []
    assert CountedId.num_compared <= len(names), "a renamed folder gives all items other ids"


def test_what_an_earlier_process_left_is_given_out_once_it_was_compared_with_the_store(cache, tmp_path):
    for item_id in "ab":
        cache.put(ThumbnailKey(item_id, "1"), item_id.encode())
    later = ThumbnailCache(tmp_path / "cache", MAX_BYTES)
    assert later.get(ThumbnailKey("b", "1")) is None
    later.keep_only(ids("b"))
    assert (later.get(ThumbnailKey("a", "1")), later.get(ThumbnailKey("b", "1"))) == (None, b"b")
    assert files(tmp_path) == [b"b"]


def test_what_another_server_deletes_while_the_folder_is_read_hides_no_other_thumbnail(cache, tmp_path):
    for item_id in "ab":
        cache.put(ThumbnailKey(item_id, "1"), item_id.encode())
    for path in (tmp_path / "cache").iterdir():
        (path / "0").symlink_to("deleted")
    later = ThumbnailCache(tmp_path / "cache", MAX_BYTES)
    later.keep_only(ids("a", "b"))
    assert [later.get(ThumbnailKey(item_id, "1")) for item_id in "ab"] == [b"a", b"b"]
    assert later.num_bytes == 2


def test_a_folder_that_cannot_be_written_or_lost_its_files_is_as_none(tmp_path, cache):
    cache.put(ThumbnailKey("a", "1"), b"a")
    for path in (tmp_path / "cache").rglob("*"):
        if path.is_file():
            path.unlink()
    assert cache.get(ThumbnailKey("a", "1")) is None
    blocked = ThumbnailCache(tmp_path / "file" / "cache", MAX_BYTES)
    (tmp_path / "file").write_text("no folder")
    blocked.keep_only(ids("a"))
    blocked.put(ThumbnailKey("a", "1"), b"a")
    assert blocked.get(ThumbnailKey("a", "1")) is None
