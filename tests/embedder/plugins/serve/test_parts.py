"""Pure parts of the service: paths of items, ranges, cursors, facets."""

import asyncio
import datetime
import os
import threading
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

from embedder.plugins.serve.clips import _pieces, clip_response, parse_range
from embedder.plugins.serve.cursors import NAME_BYTES, Cursor, make_cursor, read_cursor
from embedder.plugins.serve.hand_on_routes import _stream
from embedder.plugins.serve.info_routes import MAX_DISTINCT, describe_column
from embedder.plugins.serve.item_paths import item_path
from embedder.plugins.serve.serve_errors import RequestError
from embedder.plugins.serve.task_threads import TaskThreads
from embedder.sources.item_ranges import BytesRanges
from embedder.storage.item_error import ItemError


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        ("a.jpg", "/items/a.jpg"),
        ("a%2Fb.jpg", "/items/a%2Fb.jpg"),
        ("a%2Fimage", "/items/a%2Fimage"),
        ("a%2Fimage/image", "/items/a%2Fimage/image"),
        ("image", "/items/image"),
        ("image/clip", "/items/image/clip"),
        ("%2E%2E%2Fetc", "/items/..%2Fetc"),
        ("a/b.jpg", "/items/a%2Fb.jpg"),  # a proxy has decoded it
        ("a/b.jpg/image", "/items/a%2Fb.jpg/image"),
        ("%25", "/items/%25"),
    ],
)
def test_an_id_is_one_part_of_the_path(raw, path):
    assert item_path(raw) == path


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, None),
        ("bytes=0-0", (0, 1)),
        ("bytes=2-", (2, 10)),
        ("bytes=-3", (7, 10)),
        ("bytes=-30", (0, 10)),
        ("bytes=8-99", (8, 10)),
        ("bytes=-", None),
        ("bytes=5-2", None),
        ("bytes=0-1,3-4", None),
        ("bytes=" + "9" * 19 + "-", None),
    ],
)
def test_ranges_are_read_as_the_standard_says(header, expected):
    assert parse_range(header, 10) == expected


@pytest.mark.parametrize("header", ["bytes=10-", "bytes=10-12", "bytes=-0"])
def test_a_range_beyond_the_end_is_refused(header):
    with pytest.raises(RequestError) as refusal:
        parse_range(header, 10)
    assert (refusal.value.status, refusal.value.headers) == (416, {"content-range": "bytes */10"})


def test_a_cursor_comes_back_as_it_was():
    cursor = Cursor("run/index 1", "d", bytes(NAME_BYTES * 100))
    assert read_cursor(make_cursor(cursor), 100) == cursor


def cursor_of(num_bytes):
    return make_cursor(Cursor("v", "d", bytes(num_bytes)))


@pytest.mark.parametrize(
    "text", ["", "ä", "W10=", "eyJ9", cursor_of(NAME_BYTES * 101), cursor_of(0), cursor_of(NAME_BYTES + 1)]
)
def test_what_is_no_cursor_is_refused(text):
    with pytest.raises(RequestError):
        read_cursor(text, 100)


def column(values, kind):
    return describe_column("c", pa.chunked_array([pa.array(values, kind)]))


def test_columns_are_described_by_their_types():
    assert column(["b", "a", None, "b"], pa.string()) == {
        "name": "c",
        "type": "text",
        "num_null": 1,
        "values": [{"value": "b", "count": 2}, {"value": "a", "count": 1}],
        "min": None,
        "max": None,
    }
    price = column([Decimal("1.50"), Decimal("0.25"), None], pa.decimal128(10, 2))
    assert (price["type"], price["min"], price["max"]) == ("number", 0.25, 1.5)
    day = datetime.datetime(2026, 1, 2)
    taken = column([day, None], pa.timestamp("us"))
    assert (taken["type"], taken["min"], taken["values"]) == ("time", day, [{"value": day, "count": 1}])
    assert column([True, None, False], pa.bool_())["type"] == "boolean"
    assert column([None, None], pa.float64())["min"] is None
    assert column([[1]], pa.list_(pa.int32())) is None


def test_values_that_are_nearly_all_different_are_not_listed():
    assert column([str(each) for each in range(MAX_DISTINCT + 1)], pa.string())["values"] is None
    assert len(column([str(each) for each in range(MAX_DISTINCT)], pa.string())["values"]) == 50
    many = column(list(range(60)), pa.int64())
    assert (many["values"], many["min"], many["max"]) == (None, 0, 59)


STREAMS = {
    "a file": (lambda threads: _pieces(BytesRanges(b"PK"), 0, 2, threads), b"PK"),
    "an archive": (lambda threads: _stream(SimpleNamespace(exports=threads), []), b"PK"),
}


@pytest.mark.parametrize("stream", STREAMS)
def test_an_answer_that_has_begun_goes_on_while_new_requests_are_refused(stream):
    begin, head = STREAMS[stream]

    async def scenario():
        threads, go = TaskThreads("clips", 1, max_waiting=1), threading.Event()
        first = asyncio.create_task(threads.run(go.wait))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="1 requests wait for clips"):
            await threads.run(go.wait)
        begun = asyncio.create_task(anext(begin(threads)))
        await asyncio.sleep(0)
        go.set()
        await first
        return await begun

    assert asyncio.run(scenario()).startswith(head)


def test_a_file_that_was_opened_is_answered_and_not_left_open_while_new_requests_are_refused(tmp_path):
    (tmp_path / "a.mp4").write_bytes(b"clip")
    row = {"item_id": "a", "uri": str(tmp_path / "a.mp4"), "modality": "video"}
    any_file = SimpleNamespace(of=lambda *_: None)

    async def scenario():
        threads, go = TaskThreads("clips", 1, max_waiting=1), threading.Event()
        asked = asyncio.create_task(
            clip_response(row, {}, None, files=any_file, threads=threads, max_bytes=1 << 20, with_body=False)
        )
        await asyncio.sleep(0)
        others = asyncio.create_task(threads.continue_answer(go.wait))
        answer = await asked
        go.set()
        await others
        return answer

    assert asyncio.run(scenario()).headers["content-length"] == "4"
    assert str(tmp_path / "a.mp4") not in {os.path.realpath(each) for each in Path("/proc/self/fd").iterdir()}


class HeldHit:
    """Hit whose file is read once `go` is set."""

    item_id = "a.mp4"

    def __init__(self):
        self.begun, self.go, self.is_closed = threading.Event(), threading.Event(), False

    def pieces(self, fetcher):
        self.begun.set()
        try:
            self.go.wait()
            yield b"clip"
        finally:
            self.is_closed = True


def test_an_archive_whose_client_leaves_while_a_file_is_read_is_ended_without_a_fault():
    hit = HeldHit()

    async def scenario():
        threads = TaskThreads("clips", 2)
        begun = asyncio.create_task(anext(_stream(SimpleNamespace(exports=threads), [hit])))
        await asyncio.to_thread(hit.begun.wait)
        begun.cancel()
        asyncio.get_running_loop().call_later(0.05, hit.go.set)
        with pytest.raises(asyncio.CancelledError):
            await begun

    asyncio.run(scenario())
    assert hit.is_closed


def test_a_file_that_can_not_be_read_on_ends_the_answer(caplog):
    class Lost(BytesRanges):
        def read_at(self, offset, length):
            raise ItemError("NetworkError", "photos.example: no answer", transient=True)

    async def scenario():
        return [piece async for piece in _pieces(Lost(b"PK"), 0, 2, TaskThreads("clips", 1))]

    assert asyncio.run(scenario()) == []
    assert "photos.example: no answer" in caplog.text
