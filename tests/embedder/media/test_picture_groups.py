"""Frames on demand are those that decoding in sequence gives, to the bit; and fewer are decoded."""

import io
from fractions import Fraction

import av
import numpy as np
import pytest

from embedder.media.picture_groups import FrameOnDemand, GroupedFrames

NUM_FRAMES = 120
CLIPS = {
    "B frames": ("mp4", "libx264", {"g": "30"}),
    "one group": ("matroska", "libx264", {"g": "250", "bf": "8"}),
    "open groups": ("matroska", "libx264", {"x264-params": "open-gop=1:keyint=20"}),
    "refreshed in stripes": ("mp4", "libx264", {"x264-params": "intra-refresh=1:keyint=30"}),
    "interlaced": ("mp4", "libx264", {"g": "25", "x264-params": "interlaced=1"}),
    "parameter sets in the stream": ("mpegts", "libx264", {"g": "25", "x264-params": "slices=3"}),
    "only times of decoding": ("avi", "libx264", {"g": "30"}),
    "HEVC, closed groups": ("mp4", "libx265", {"x265-params": "log-level=none:keyint=30:open-gop=0"}),
    "HEVC, open groups": ("matroska", "libx265", {"x265-params": "log-level=none:keyint=30"}),
    "VP9 with hidden frames": ("webm", "libvpx-vp9", {"g": "40", "auto-alt-ref": "1", "cpu-used": "8"}),
    "VP8 with hidden frames": ("webm", "libvpx", {"g": "40", "auto-alt-ref": "1", "lag-in-frames": "16"}),
    "MPEG-4": ("mp4", "mpeg4", {"bf": "2"}),
    "no prediction": ("mov", "mjpeg", {}),
}
IN_SEQUENCE = {"only times of decoding", "VP8 with hidden frames", "MPEG-4"}
SHORT_GROUPS = {"B frames", "interlaced", "parameter sets in the stream", "HEVC, closed groups", "no prediction"}
TIMES = {
    "even": list(range(0, 40 * NUM_FRAMES, 40)),
    "uneven": np.cumsum(np.random.default_rng(1).choice([5, 33, 120, 400], NUM_FRAMES)).tolist(),
    "late": list(range(7000, 7000 + 40 * NUM_FRAMES, 40)),
    "negative": list(range(-900, 40 * NUM_FRAMES - 900, 40)),
}


def encode(kind, codec, options, times=TIMES["even"]):
    """A clip in which something moves and much changes at once now and then."""
    noise = np.random.default_rng(0).integers(0, 256, (96, 128, 3), dtype=np.uint8).repeat(4, 0).repeat(4, 1)
    file, base = io.BytesIO(), Fraction(1, 1000)
    with av.open(file, "w", format=kind, options={"avoid_negative_ts": "disabled"}) as container:
        stream = container.add_stream(codec, 25, options=options)
        stream.width, stream.height = 96, 80
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        if times is not TIMES["even"]:
            stream.codec_context.time_base = base
        for number, time_ms in enumerate(times):
            pixels = noise[2 * number :, number:][:80, :96] // 2 + 100 * (number // 40 % 2)
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels.astype(np.uint8)), format="rgb24")
            frame.pts = number
            if times is not TIMES["even"]:
                frame.pts, frame.time_base = time_ms, base
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def in_sequence(clip):
    with av.open(io.BytesIO(clip)) as container:
        return [(frame.pts, frame.duration, frame.to_ndarray()) for frame in container.decode(video=0)]


def on_demand(clip, wanted):
    """Times of all frames, pixels of those wanted, whether every frame was on demand, number of packets decoded."""
    with av.open(io.BytesIO(clip)) as container:
        stream = container.streams.video[0]
        frames, pixels, are_on_demand = [], {}, True
        packets = (packet for packet in container.demux(stream) if packet.size)
        grouped = GroupedFrames(packets, stream)
        for number, frame in enumerate(grouped):
            frames.append((frame.pts, frame.duration))
            is_on_demand = isinstance(frame, FrameOnDemand)
            are_on_demand &= is_on_demand
            if number in wanted:
                pixels[number] = (frame.decode() if is_on_demand else frame).to_ndarray()
        return frames, pixels, are_on_demand, grouped.decoded.num_packets


def check_equal(clip, wanted):
    expected = in_sequence(clip)
    frames, pixels, are_on_demand, num_decoded = on_demand(clip, wanted)
    assert frames == [(pts, duration) for pts, duration, _ in expected]
    assert all(np.array_equal(pixels[number], expected[number][2]) for number in wanted)
    return are_on_demand, num_decoded


@pytest.mark.medium
@pytest.mark.parametrize("wanted", [range(NUM_FRAMES), range(7, NUM_FRAMES, 31), (119,), (0, 1, 2, 60, 61)])
@pytest.mark.parametrize("name", CLIPS)
def test_frames_on_demand_are_those_of_decoding_in_sequence(name, wanted):
    are_on_demand, num_decoded = check_equal(encode(*CLIPS[name]), wanted)
    assert are_on_demand == (name not in IN_SEQUENCE)
    if name in SHORT_GROUPS and len(wanted) == 1:
        assert num_decoded <= 40  # the first group is begun, the last one is decoded


@pytest.mark.parametrize("kind", ["mp4", "matroska"])
@pytest.mark.parametrize("times", TIMES)
def test_times_of_frames_on_demand_are_those_of_decoding_in_sequence(kind, times):
    assert check_equal(encode(kind, "libx264", {"g": "30"}, TIMES[times]), range(3, 90, 17))


def test_frames_that_nothing_is_predicted_from_are_passed_over():
    clip = encode("mp4", "libx264", {"g": "250", "bf": "3", "x264-params": "b-pyramid=none:b-adapt=0:scenecut=0"})
    are_on_demand, num_decoded = check_equal(clip, (100,))
    assert are_on_demand
    assert num_decoded < 50


def test_frames_before_damage_are_there_and_then_it_is_raised():
    clip = encode("mp4", "libx264", {"g": "30"})
    with av.open(io.BytesIO(clip)) as container:
        stream = container.streams.video[0]

        def damaged():
            for number, packet in enumerate(container.demux(stream)):
                if number == 70:
                    raise ValueError("damage")
                yield packet

        frames = GroupedFrames(damaged(), stream)
        seen = []
        with pytest.raises(ValueError, match="damage"):
            for frame in frames:
                seen.append(frame.pts)
    expected = [pts for pts, _, _ in in_sequence(clip)]
    assert 64 <= len(seen) <= 70
    assert seen == expected[: len(seen)]
