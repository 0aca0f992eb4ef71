"""The pure parts: sizes, segments, clocks, declared lengths."""

import io
import itertools
from fractions import Fraction

import pytest

from embedder.media.declared_size import declared_bytes
from embedder.media.resize import ResizeSpec, fitting_scale, kept_box, long_cut, scaled_size
from embedder.media.segments import FrameClock, SegmentRule, TimedFrame, pick_segments


@pytest.mark.parametrize(
    ("resize", "size", "expected"),
    [
        ("squash", (640, 480), (224, 224)),
        ("crop", (640, 480), (298, 224)),
        ("crop", (480, 640), (224, 298)),
        ("crop", (100, 100), (224, 224)),
        ("pad", (640, 480), (224, 168)),
        ("pad", (1, 50000), (1, 224)),
        ("fit", (640, 480), (224, 168)),
        ("fit", (40, 30), (40, 30)),
        ("fit", (1, 50000), (1, 224)),
    ],
)
def test_scaled_sizes(resize, size, expected):
    assert scaled_size(size, ResizeSpec(224, resize)) == expected


def test_crop_takes_the_middle():
    crop = ResizeSpec(224, "crop")
    assert kept_box((298, 224), crop) == (37, 0, 261, 224)
    assert kept_box((224, 299), crop) == (0, 38, 224, 262)  # half of 75, rounded to even as torchvision does
    assert kept_box((224, 299), ResizeSpec(224, "crop", resampler="torchvision")) == (0, 37, 224, 261)
    assert kept_box((224, 168), ResizeSpec(224, "pad")) == (0, 0, 224, 168)


def test_the_resize_may_be_larger_than_the_crop():
    for mode, scaled, box in (("crop", (341, 256), (58, 16, 282, 240)), ("squash", (256, 256), (16, 16, 240, 240))):
        rule = ResizeSpec(224, mode, resize_size=256)
        assert scaled_size((640, 480), rule) == scaled
        assert kept_box(scaled, rule) == box
    assert kept_box((224, 224), ResizeSpec(224)) == (0, 0, 224, 224)


def test_only_very_long_images_are_cut_before_the_resize():
    crop = ResizeSpec(224, "crop", reduced_decode=True)
    assert long_cut((400, 100), crop) is None
    assert long_cut((50_000, 1), crop) == (24_998, 0, 25_002, 1)
    assert long_cut((10, 1001), crop) == (0, 480, 10, 521)  # whole squares from both ends: the middle stays
    for exact in (ResizeSpec(224, "crop"), ResizeSpec(224, "crop", resampler="torchvision", reduced_decode=True)):
        assert long_cut((10, 640), exact) is None
        assert long_cut((10, 661), exact) == (0, 10, 10, 651)
    assert long_cut((50_000, 1), ResizeSpec(224)) is None


@pytest.mark.parametrize("resize", ["squash", "crop", "pad"])
def test_a_reduced_jpeg_keeps_twice_the_target(resize):
    rule = ResizeSpec(224, resize, reduced_decode=True)
    for size in ((640, 480), (4000, 300), (1, 9), (3000, 4000), (900, 900)):
        target, scale = scaled_size(size, rule), fitting_scale(size, rule)
        assert scale == 1 or all(have // scale >= 2 * want for have, want in zip(size, target, strict=True))
    assert [fitting_scale((edge, edge), rule) for edge in (895, 896, 1792, 10_000)] == [1, 2, 4, 8]


def cut(times, *, segment_s=5, num=4, duration_s=None, shown_s=1):
    frames = (TimedFrame(Fraction(time), Fraction(shown_s), time) for time in times)
    rule = SegmentRule(Fraction(segment_s), num, None if duration_s is None else Fraction(duration_s))
    return [(s.segment, float(s.start_s), float(s.end_s), s.images) for s in pick_segments(frames, lambda f: f, rule)]


def test_frames_are_spread_evenly_over_each_segment():
    times = [Fraction(i, 10) for i in range(100)]
    first, second = cut(times, duration_s=10, shown_s=Fraction(1, 10))
    # targets 0.625, 1.875, 3.125, 4.375: the frame shown then began at the tenth before
    assert first == (0, 0.0, 5.0, [Fraction(6, 10), Fraction(18, 10), Fraction(31, 10), Fraction(43, 10)])
    assert second == (1, 5.0, 10.0, [Fraction(56, 10), Fraction(68, 10), Fraction(81, 10), Fraction(93, 10)])


@pytest.mark.parametrize(
    ("times", "how", "last"),
    [
        ([0, 1, 2, 3], {"segment_s": 4, "num": 2}, (0, 0.0, 4.0, [1, 3])),  # a frame that begins at a target answers it
        (range(7), {"duration_s": 7, "num": 2}, (1, 5.0, 7.0, [5, 6])),  # a shorter one spreads over its own length
        (range(8), {"duration_s": 8, "num": 3}, (1, 5.0, 8.0, [5, 6, 7])),
        (range(7), {}, (1, 5.0, 7.0, [5, 6])),  # without a known duration it keeps what there is
        ([0], {}, (0, 0.0, 1.0, [0])),
        ([0], {"duration_s": Fraction(1, 25), "shown_s": Fraction(1, 25)}, (0, 0.0, 0.04, [0])),
        ([], {}, None),
    ],
)
def test_the_last_segment_has_the_frames_that_there_are(times, how, last):
    found = cut(times, **how)
    assert (found[-1] if found else None) == last
    assert [each[0] for each in found] == list(range(len(found)))


def test_a_lying_duration_changes_neither_the_times_nor_the_count_of_segments():
    for lie in (Fraction(1, 1000), 1, 3, 6, 1000, 10**12):
        segments = cut(range(12), duration_s=lie)
        assert [s[:3] for s in segments] == [(0, 0.0, 5.0), (1, 5.0, 10.0), (2, 10.0, 12.0)]
        assert all(1 <= len(s[3]) <= 4 for s in segments)


def test_a_gap_of_years_costs_no_segments_and_the_frame_before_it_fills_in():
    year = 365 * 86400
    segments = cut([0, 1, year + 3])
    assert [s[0] for s in segments] == [0, year // 5]
    assert segments[0][3] == [0, 1]  # 0.625 shows 0; 1.875, 3.125, 4.375 show 1
    assert segments[1][3] == [1, year + 3]  # 0.625 and 1.875 of the segment still show the frame before the gap


def test_segments_are_given_out_as_soon_as_they_are_over():
    pulled = []
    frames = (pulled.append(time) or TimedFrame(Fraction(time), Fraction(1), time) for time in itertools.count())
    segments = pick_segments(frames, lambda frame: frame, SegmentRule(Fraction(5), 4))
    assert next(segments).segment == 0
    assert pulled == [0, 1, 2, 3, 4, 5]


def test_a_break_in_the_middle_loses_only_the_open_segment():
    def broken():
        yield from (TimedFrame(Fraction(time), Fraction(1), time) for time in range(8))
        raise ValueError("damaged")

    segments = pick_segments(broken(), lambda frame: frame, SegmentRule(Fraction(5), 2))
    assert next(segments).images == [1, 3]
    with pytest.raises(ValueError, match="damaged"):
        next(segments)


def test_clock_counts_from_the_first_frame_and_mends_bad_timestamps():
    clock = FrameClock(Fraction(1, 1000), Fraction(1, 10))
    ticks = [clock.tick(pts, None)[0] for pts in (5000, 5100, None, 5300, 5300, 100, 6000)]
    assert [float(t) for t in ticks] == [0, 0.1, 0.2, 0.3, 0.4, 0.5, 1.0]


def test_clock_without_any_timestamp_counts_frames():
    clock = FrameClock(Fraction(1, 1000), Fraction(1, 25))
    assert [clock.tick(None, duration)[0] for duration in (None, 500, 0)] == [0, Fraction(1, 25), Fraction(27, 50)]


@pytest.mark.parametrize("kind", ["mp4", "mov", "mkv", "avi"])
def test_whole_files_declare_their_size(make_video, kind):
    whole = make_video([(50, 90, 200)] * 30, kind=kind).read_bytes()
    assert declared_bytes(io.BytesIO(whole)) == len(whole)
    assert declared_bytes(io.BytesIO(whole[: len(whole) // 2])) > len(whole) // 2
    assert declared_bytes(io.BytesIO(whole + b"\0" * 100 + b"rubbish")) == len(whole)


@pytest.mark.parametrize("head", [b"", b"\x1a\x45\xdf\xa3", b"\x1a\x45\xdf\xa3" + b"\x00" * 60, b"RIFF", b"text"])
def test_broken_headers_declare_nothing_above_the_file(head):
    assert (declared_bytes(io.BytesIO(head)) or 0) <= 8


def test_live_recordings_leave_the_size_open():
    ebml = b"\x1a\x45\xdf\xa3\x84abcd"
    assert declared_bytes(io.BytesIO(ebml + b"\x18\x53\x80\x67\x01" + b"\xff" * 7 + b"x" * 20)) is None
    assert declared_bytes(io.BytesIO(ebml + b"\x18\x53\x80\x67\x8a" + b"x" * 40)) == 9 + 5 + 10
