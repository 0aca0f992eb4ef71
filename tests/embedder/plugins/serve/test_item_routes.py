"""Items by HTTP: row, provenance and neighbours, images, and clips by Range."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from embedder.plugins.serve import hand_on_routes

PICTURE, CLIP = "pictures/0000.png", "clips/0.mp4"


def test_an_item_shows_row_segments_provenance_and_neighbours(server):
    answer = server.item(PICTURE, "?neighbours=3")
    assert answer.status == 200, answer.body
    found = answer.json
    assert found["item"]["item_id"] == PICTURE
    assert found["item"]["uri"] is None
    assert [segment["caption"] for segment in found["segments"]] == ["a red car on the road"]
    assert "image_embedding" not in found["segments"][0]
    assert found["provenance"]["model"] == server.store.info.model_fingerprint
    assert found["provenance"]["run_id"] == server.store.current.run_id
    vector = next(row["image_embedding"] for row in server.store.to_arrow().to_pylist() if row["item_id"] == PICTURE)
    nearest = [hit.item_id for hit in server.store.search(np.array(vector, np.float32), k=4)]
    assert nearest[0] == PICTURE
    assert [hit["item_id"] for hit in found["neighbours"]] == nearest[1:]


def test_a_video_shows_all_its_segments(server):
    found = server.item(CLIP).json
    times = [(segment["segment"], segment["start_s"]) for segment in found["segments"]]
    assert times == sorted(times)
    assert found["item"]["num_vectors"] == len(times)


@pytest.mark.parametrize("size", [160, 320, 640, 1280])
def test_an_image_comes_as_webp_in_its_proportions_and_is_not_enlarged(server, size):
    answer = server.item(PICTURE, f"/image?size={size}")
    assert (answer.status, answer.headers["Content-Type"]) == (200, "image/webp"), answer.body
    image = Image.open(BytesIO(answer.body))
    assert image.size == (40, 30)
    coarse, original = (
        np.asarray(each.convert("RGB").resize((4, 3), Image.Resampling.BOX), float)
        for each in (image, Image.open(server.source / PICTURE))
    )
    assert np.abs(coarse - original).max() < 12


def test_an_image_is_not_sent_again_to_who_has_it(server):
    first = server.item(PICTURE, "/image?size=160")
    assert first.headers["Cache-Control"].startswith("private")
    again = server.item(PICTURE + "", "/image?size=160")
    assert again.headers["ETag"] == first.headers["ETag"]
    other = server.item(PICTURE, "/image?size=320")
    assert other.headers["ETag"] != first.headers["ETag"]
    same = server.get("/items/pictures%2F0000.png/image?size=160", If_None_Match=first.headers["ETag"])
    assert (same.status, same.body) == (304, b"")


def test_a_clip_shows_the_frame_in_the_middle_of_a_segment(server):
    answer = server.item(CLIP, "/image?size=160&segment=0")
    assert answer.status == 200, answer.body
    image = Image.open(BytesIO(answer.body))
    assert image.size == (48, 48)
    assert abs(np.asarray(image.convert("L"), float).mean() - 127) < 15, "brightness grows with time"
    assert server.item(CLIP, "/image?segment=7").error["where"] == "query.segment"


def test_a_clip_comes_whole_and_by_ranges_with_its_moment(server):
    content = (server.source / CLIP).read_bytes()
    whole = server.item(CLIP, "/clip")
    assert (whole.status, whole.body, whole.headers["Content-Type"]) == (200, content, "video/mp4")
    assert (whole.headers["Accept-Ranges"], whole.headers["X-Moment-Start"]) == ("bytes", "0.000")
    path, size = "/items/clips%2F0.mp4/clip", len(content)
    for given, start, stop in (("0-9", 0, 10), ("5-", 5, size), ("-7", size - 7, size), ("10-999999", 10, size)):
        part = server.get(path, Range=f"bytes={given}")
        assert (part.status, part.body) == (206, content[start:stop])
        assert part.headers["Content-Range"] == f"bytes {start}-{stop - 1}/{size}"
    for given in ("nonsense", "bytes=9-3", "bytes=0-1,4-5", "lines=1-2"):
        assert server.get(path, Range=given).status == 200
    for given in (f"bytes={size}-", f"bytes={size + 5}-{size + 9}", "bytes=-0"):
        beyond = server.get(path, Range=given)
        assert (beyond.status, beyond.headers["Content-Range"]) == (416, f"bytes */{size}")
        assert beyond.error["where"] == "header.Range"
    stale = server.get(path, Range="bytes=0-9", If_Range='"another"')
    assert (stale.status, len(stale.body)) == (200, size)
    head = server.get(path, method="HEAD")
    assert (head.status, head.body, head.headers["Content-Length"]) == (200, b"", str(size))


def test_an_image_has_no_clip(server):
    answer = server.item(PICTURE, "/clip")
    assert (answer.status, answer.error["what"]) == (422, "it is no video")


def test_an_item_whose_file_is_gone_says_so_and_not_where_it_was(server):
    gone = server.source / "pictures" / "0005.png"
    away = gone.rename(server.source.parent / "away.png")
    try:
        answer = server.item("pictures/0005.png", "/image")
    finally:
        away.rename(gone)
    assert answer.status == 404
    assert str(server.source) not in answer.body.decode()
    assert server.item("pictures/0005.png", "/image").status == 200, "nothing of the failure is kept"


def test_sheets_keep_no_clip_waiting(server, monkeypatch):
    begun, go = [], threading.Event()

    def draw(hits):
        begun.append(hits)
        go.wait(5)
        return b"a sheet"

    monkeypatch.setattr(hand_on_routes, "_sheet", draw)
    with ThreadPoolExecutor(6) as pool:
        sheets = [pool.submit(server.post, "/export", {"items": [PICTURE], "format": "sheet"}) for _ in range(6)]
        while len(begun) < 2:
            time.sleep(0.01)
        time.sleep(0.2)  # the others have come
        part = server.item(CLIP, "/clip")
        assert not any(each.done() for each in sheets)
        go.set()
    assert part.status == 200
    assert {each.result().body for each in sheets} == {b"a sheet"}
