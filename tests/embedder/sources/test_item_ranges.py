"""Any bytes of an item by ranges, whatever holds them, and nothing beyond it."""

import io
import tarfile
from contextlib import closing

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embedder.sources.fetch import FetchError
from embedder.sources.item_ranges import open_item
from embedder.sources.uris import cell_prefix, member_uri, row_uri

CONTENT = bytes(range(256)) * 10
MAX_BYTES = 1 << 20


def tar(folder):
    """A tar with another member before and behind; gives the item's uri."""
    path = folder / "a.tar"
    with tarfile.open(path, "w") as file:
        for name, content in (("before", b"x" * 700), ("clip.mp4", CONTENT), ("behind", b"y" * 700)):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    with tarfile.open(path) as file:
        return member_uri(str(path), "clip.mp4", file.getmember("clip.mp4").offset_data, len(CONTENT))


def whole(folder):
    (folder / "clip.mp4").write_bytes(CONTENT)
    return str(folder / "clip.mp4")


def cell(folder):
    path = str(folder / "a.parquet")
    pq.write_table(pa.table({"video": [b"other", CONTENT]}), path)
    return f"{cell_prefix(path, 'video', 0)}1"


@pytest.mark.parametrize("make", [whole, tar, cell])
def test_every_range_is_the_items_own(tmp_path, make):
    with closing(open_item(make(tmp_path), max_bytes=MAX_BYTES)) as ranges:
        assert ranges.size == len(CONTENT)
        for start, length in ((0, 10), (255, 3), (2550, 100), (len(CONTENT), 5), (0, 1 << 30)):
            assert ranges.read_at(start, length) == CONTENT[start : start + length]


def test_an_object_is_read_by_ranges(bucket):
    bucket.objects["clips/a.mp4"] = CONTENT
    with closing(open_item("s3://team/clips/a.mp4", max_bytes=MAX_BYTES)) as ranges:
        assert (ranges.size, ranges.read_at(100, 7)) == (len(CONTENT), CONTENT[100:107])


def test_a_member_of_a_tar_that_was_rewritten_is_not_given_out(tmp_path):
    uri = tar(tmp_path)
    with tarfile.open(tmp_path / "a.tar", "w") as file:
        member = tarfile.TarInfo("secret")
        member.size = 5000
        file.addfile(member, io.BytesIO(b"s" * 5000))
    with pytest.raises(FetchError, match="not where the listing found it"):
        open_item(uri, max_bytes=MAX_BYTES)


def test_what_is_gone_too_large_or_nothing_is_an_error(tmp_path):
    for uri, limit in ((str(tmp_path / "gone"), MAX_BYTES), (cell(tmp_path), 10), (row_uri("t.parquet", 1), MAX_BYTES)):
        with pytest.raises(FetchError):
            open_item(uri, max_bytes=limit)
