"""Any bytes of an item by ranges, whatever holds them, and nothing beyond it."""

import io
import tarfile
import tempfile
from contextlib import closing

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import samples
from web_server import by_ranges, web_server

from embedder.sources.fetch import FetchError
from embedder.sources.item_ranges import open_item
from embedder.sources.uris import cell_prefix, member_uri, row_uri
from embedder.sources.web import body

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


def test_a_video_of_the_web_is_downloaded_once_and_read_by_ranges(tmp_path, monkeypatch):
    clip = samples.clip(tmp_path / "a.mp4").read_bytes()
    monkeypatch.setattr(body, "HELD_BYTES", 1000)  # to a temporary file
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    with web_server() as server:
        server.routes["/a.mp4"] = lambda handler: handler.send(clip)
        uri = f"{server.url}/a.mp4"
        monkeypatch.delenv("EMBEDDER_ALLOW_PRIVATE", raising=False)
        with pytest.raises(FetchError, match="PrivateAddress"):
            open_item(uri, max_bytes=MAX_BYTES)
        monkeypatch.setenv("EMBEDDER_ALLOW_PRIVATE", "1")
        with closing(open_item(uri, max_bytes=MAX_BYTES)) as ranges:
            assert list((tmp_path / "temporary").iterdir()) == []  # it goes with the last one who has it open
            for start, length in ((0, 10), (1000, 3000), (len(clip) - 5, 100)):
                assert ranges.read_at(start, length) == clip[start : start + length]
        assert len(server.requests) == 1


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


@pytest.fixture
def web(monkeypatch):
    """A web server on loopback that may be reached."""
    monkeypatch.setenv("EMBEDDER_ALLOW_PRIVATE", "1")
    with web_server() as server:
        yield server


def test_of_a_video_of_the_web_only_what_is_read_is_requested(web, tmp_path):
    clip = samples.clip(tmp_path / "a.mp4").read_bytes() + bytes(1 << 20)
    web.routes["/a.mp4"] = by_ranges(clip)
    with closing(open_item(f"{web.url}/a.mp4", max_bytes=MAX_BYTES)) as ranges:
        assert ranges.size == len(clip)
        for start, length in ((0, 10), (500_000, 3000), (len(clip) - 5, 100), (len(clip), 5)):
            assert ranges.read_at(start, length) == clip[start : start + length]
        assert [headers["Range"] for _, _, headers in web.requests] == [
            "bytes=0-65535", "bytes=500000-502999", f"bytes={len(clip) - 5}-{len(clip) - 1}",
        ]  # fmt: skip
        assert web.num_connections == 1
        web.routes["/a.mp4"] = by_ranges(clip, '"2"')
        with pytest.raises(FetchError, match="has changed while it was read"):
            ranges.read_at(500_000, 10)


@pytest.mark.parametrize(
    ("status", "fields"),
    [(206, {}), (206, {"Content_Range": "bytes 5-9/10"}), (206, {"Content_Range": "bytes 0-65535/*"}), (416, {})],
)
def test_a_range_that_is_another_one_than_was_asked_for_is_not_taken(web, tmp_path, status, fields):
    clip = samples.clip(tmp_path / "a.mp4").read_bytes()

    def answer(handler):
        handler.send(clip) if handler.headers.get("Range") is None else handler.send(b"x" * 10, status, **fields)

    web.routes["/a.mp4"] = answer
    with closing(open_item(f"{web.url}/a.mp4", max_bytes=MAX_BYTES)) as ranges:
        assert ranges.read_at(0, 1 << 30) == clip


def test_a_video_larger_than_any_may_be_is_refused_by_what_its_server_says(web, tmp_path):
    head = samples.clip(tmp_path / "a.mp4").read_bytes()[:1000]
    place = "bytes 0-999/999999999999999999"
    web.routes["/a.mp4"] = lambda handler: handler.send(head, 206, Content_Range=place)
    with pytest.raises(FetchError, match="999,999,999,999,999,999 bytes; decode.max_video_bytes allows"):
        open_item(f"{web.url}/a.mp4", max_bytes=MAX_BYTES)


def test_what_is_no_image_or_video_is_not_given_out_by_ranges_either(web):
    web.routes["/a.mp4"] = by_ranges(b"<!doctype html><p>secret" + bytes(1 << 17))
    with pytest.raises(FetchError, match="NotMedia"):
        open_item(f"{web.url}/a.mp4", max_bytes=MAX_BYTES)
