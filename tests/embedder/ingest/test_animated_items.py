"""Animated images in a store: their first frame, or a vector for each segment, as the configuration says."""

import os

import numpy as np
import pytest
import samples
from embedding_runs import embedded
from PIL import Image

import embedder

pytestmark = pytest.mark.medium

MOVING, STILL = "moving.gif", "still.gif"
FRAMES = [samples.make_image(number) for number in range(4)]


@pytest.fixture
def source(tmp_path):
    """A GIF of two seconds, one of a single frame, and each frame of the first as a PNG."""
    folder = tmp_path / "in"
    folder.mkdir()
    first, *more = (frame.quantize(256) for frame in FRAMES)
    first.save(folder / MOVING, save_all=True, append_images=more, duration=500, optimize=False)
    first.save(folder / STILL)
    (folder / "moving.txt").write_text("seven white horses")
    with Image.open(folder / MOVING) as shown:
        for number in range(4):
            shown.seek(number)
            shown.convert("RGB").save(folder / f"frame{number}.png")
    return folder


def cosine(row, other):
    return float(np.dot(row["image_embedding"], other["image_embedding"]))


def test_by_default_the_first_frame_is_embedded(make_run, source):
    _, rows = embedded(make_run(source))
    assert len(rows) == 6
    assert (rows[MOVING, 0]["modality"], rows[STILL, 0]["modality"]) == ("pair", "image")
    assert cosine(rows[MOVING, 0], rows["frame0.png", 0]) > 0.9999


def test_as_clips_each_segment_has_a_vector_and_a_still_one_stays_an_image(make_run, source):
    config = make_run(source, decode={"animations": "clip"}, segment_s=1.0, frames_per_segment=1)
    report, rows = embedded(config)
    assert (report.num_rejected, len(rows)) == (0, 7)
    assert [rows[MOVING, segment]["modality"] for segment in (0, 1)] == ["video"] * 2
    assert [(rows[MOVING, segment]["start_s"], rows[MOVING, segment]["end_s"]) for segment in (0, 1)] == [
        (0, 1),
        (1, 2),
    ]
    assert (rows[MOVING, 0]["caption"], rows[STILL, 0]["modality"]) == ("seven white horses", "image")
    assert cosine(rows[STILL, 0], rows["frame0.png", 0]) > 0.999
    for segment, frame in ((0, 1), (1, 3)):  # shown in the middle of each second
        assert cosine(rows[MOVING, segment], rows[f"frame{frame}.png", 0]) > 0.9999
    (hit,) = (each for each in embedder.open_store(config.store).search(image=str(source / "frame3.png"), k=9)
              if each.item_id == MOVING)  # fmt: skip
    assert (hit.segment, hit.image(32).size) == (1, (32, 32))


def test_the_setting_holds_for_what_is_embedded_from_then_on(make_run, source):
    embedded(make_run(source))
    config = make_run(source, decode={"animations": "clip"}, segment_s=5.0)
    assert embedded(config)[0].outcome == "nothing to do"
    os.utime(source / MOVING)  # the same bytes, which another setting embeds otherwise
    _, rows = embedded(config)
    assert rows[MOVING, 0]["modality"] == "video"
