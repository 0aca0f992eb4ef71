"""Videos: which frames are shown when, which way up, and what is kept of a damaged clip."""

import os
import socket
import threading
from contextlib import suppress
from fractions import Fraction

import av
import numpy as np
import pytest
from PIL import Image

from embedder.media.limits import DecodeLimits
from embedder.media.media_errors import DecodeError
from embedder.media.resize import ResizeSpec
from embedder.media.sandbox import SandboxedDecoder

FIT = ResizeSpec(16)
KINDS = [
    ("mp4", "mpeg4", "yuv420p"),
    ("mp4", "libx264", "yuv420p"),
    ("mp4", "libsvtav1", "yuv420p"),
    ("mov", "mjpeg", "yuvj420p"),
    ("mov", "prores", "yuv422p10le"),
    ("mkv", "ffv1", "bgr0"),
    ("mkv", "libx264", "yuv420p"),
    ("webm", "libvpx-vp9", "yuv420p"),
    ("avi", "mpeg4", "yuv420p"),
    ("avi", "rawvideo", "bgr24"),
]
WITHOUT_INDEX = [
    ("mpegts", "libx264", "yuv420p"),
    ("mpegts", "mpeg2video", "yuv420p"),
    ("mpeg", "mpeg2video", "yuv420p"),
    ("flv", "libx264", "yuv420p"),
    ("asf", "wmv2", "yuv420p"),
]


def greys(num, step=5):
    """Frame `i` is plain grey of value `step * i`, so that a pixel names the frame."""
    return [(step * i,) * 3 for i in range(num)]


def frame_numbers(segment, step=5):
    return [round(float(image.mean()) / step) for image in segment.pixels]


def segments_of(decoder, path, segment_s=2.0, frames_per_segment=4, fit=FIT):
    return list(decoder.video(path, fit, segment_s=segment_s, frames_per_segment=frames_per_segment))


def until_error(decoder, source, segment_s=1.0, frames_per_segment=2):
    segments = []
    with pytest.raises(DecodeError) as caught:
        for segment in decoder.video(source, FIT, segment_s=segment_s, frames_per_segment=frames_per_segment):
            segments.append(segment)
    return segments, caught.value


@pytest.mark.parametrize(("kind", "codec", "pix_fmt"), KINDS)
def test_segments_show_the_frames_of_their_times(decoder, make_video, kind, codec, pix_fmt):
    path = make_video(greys(50), kind=kind, codec=codec, pix_fmt=pix_fmt)
    segments = segments_of(decoder, path)
    assert [(s.segment, s.start_s, s.end_s) for s in segments] == [(0, 0, 2), (1, 2, 4), (2, 4, 5)]
    # 0.25 s, 0.75 s, ... of the first two; the last is one second long: 4.125 s, 4.375 s, ...
    assert [frame_numbers(s) for s in segments] == [[2, 7, 12, 17], [22, 27, 32, 37], [41, 43, 46, 48]]
    for segment in segments:
        seconds = [number / 10 - segment.start_s for number in frame_numbers(segment)]
        assert np.allclose(segment.times_s, seconds, atol=1e-3)
    assert {(s.pixels.dtype.name, s.pixels.shape) for s in segments} == {("uint8", (4, 16, 16, 3))}


@pytest.mark.parametrize(("kind", "codec", "pix_fmt"), WITHOUT_INDEX)
def test_clips_of_camcorders_and_tapes_give_their_frames(decoder, make_video, kind, codec, pix_fmt):
    path = make_video(greys(125, 2), kind=kind, codec=codec, pix_fmt=pix_fmt, rate=25)
    segments = segments_of(decoder, path)
    assert [(s.segment, s.start_s) for s in segments] == [(0, 0), (1, 2), (2, 4)]
    for segment in segments[:2]:
        expected = [25 * segment.start_s + shown for shown in (6, 18, 31, 43)]
        assert np.abs(np.array(frame_numbers(segment, 2)) - expected).max() <= 2  # they blur plain greys
    for segment in segments_of(decoder, path, segment_s=1.0, frames_per_segment=1)[:4]:
        assert np.array_equal(decoder.frame_at(path, FIT, segment.start_s + 0.5), segment.pixels[0])


@pytest.mark.parametrize(("kind", "codec"), [("flv", "libx264"), ("asf", "wmv2")])
def test_a_cut_off_clip_is_told_by_the_size_that_it_declares(decoder, make_video, kind, codec):
    noise = np.random.default_rng(0).integers(0, 256, (40, 48, 64, 3), dtype=np.uint8)
    whole = make_video([], frames=list(noise), kind=kind, codec=codec).read_bytes()
    segments, error = until_error(decoder, whole[: len(whole) * 6 // 10])
    assert [s.segment for s in segments] in ([0], [0, 1])
    assert error.error_type in ("TruncatedVideo", "DamagedVideo")


def test_a_cut_off_transport_stream_is_a_shorter_clip(decoder, make_video):
    noise = np.random.default_rng(0).integers(0, 256, (40, 48, 64, 3), dtype=np.uint8)
    whole = make_video([], frames=list(noise), kind="mpegts", codec="mpeg2video", rate=25).read_bytes()
    assert 1 <= len(segments_of(decoder, whole[: len(whole) * 6 // 10 // 188 * 188], segment_s=0.5)) <= 3


def test_bytes_give_the_same_as_the_file(decoder, make_video):
    path = make_video(greys(30))
    from_file, from_bytes = segments_of(decoder, path), segments_of(decoder, path.read_bytes())
    assert len(from_file) == len(from_bytes) == 2
    assert all(np.array_equal(a.pixels, b.pixels) for a, b in zip(from_file, from_bytes, strict=True))


@pytest.mark.parametrize(("num_frames", "per_segment"), [(23, 4), (16, 16), (40, 16), (7, 3), (3, 4)])
def test_from_the_start_frames_are_those_of_transformers_video_processors(decoder, make_video, num_frames, per_segment):
    path = make_video(greys(num_frames), rate=10)
    (segment,) = decoder.video(path, FIT, segment_s=60.0, frames_per_segment=per_segment, from_start=True)
    expected = np.arange(per_segment) * num_frames // per_segment  # `default_sample_indices_fn`
    assert frame_numbers(segment) == sorted(set(expected.tolist()))


def write_beside_sound(path, video, sound_s):
    """Copy a clip's packets into a Matroska file with silence that is longer."""
    with av.open(str(video)) as given, av.open(str(path), "w", format="matroska") as container:
        stream = container.add_stream_from_template(given.streams.video[0])
        sound = container.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 8000 * sound_s), np.int16), format="s16", layout="mono")
        frame.sample_rate = 8000
        for packet in given.demux(video=0):
            if packet.size:
                packet.stream = stream
                container.mux(packet)
        for packet in [*sound.encode(frame), *sound.encode()]:
            container.mux(packet)
    return path


@pytest.mark.parametrize("rate", [Fraction(24000, 1001), 25, Fraction(30000, 1001), 30, 60])
@pytest.mark.parametrize("num_frames", [16, 48])
@pytest.mark.parametrize("kind", ["matroska", "live", "sound", "mp4", "flv", "sorenson", "asf"])
def test_what_containers_round_or_leave_out_changes_no_frame_of_a_clip(
    decoder, make_video, tmp_path, kind, num_frames, rate
):
    """Matroska and FLV have times in ms and no length of a stream, a live recording none at all, MP4 one in ms.

    Packets of Sorenson's codec have no length either, and what ASF says of a stream is of the file.
    """
    containers = {"live": ("matroska", {"live": "1"}), "sound": ("matroska", {}), "sorenson": ("flv", {})}
    container, options = containers.get(kind, (kind, {}))
    codec = {"sorenson": "flv", "asf": "mpeg4"}.get(kind, "libx264")
    path = make_video(greys(num_frames), codec=codec, kind=container, rate=rate, options=options)
    if kind == "sound":
        path = write_beside_sound(tmp_path / "sound.mkv", path, sound_s=6)
    with av.open(str(path)) as opened:
        lasts_s = None if opened.duration is None else opened.duration / av.time_base
    assert kind not in ("live", "sound") or lasts_s == {"live": None, "sound": 6}[kind]
    (segment,) = decoder.video(path, FIT, segment_s=60.0, frames_per_segment=16, from_start=True)
    assert frame_numbers(segment) == [number * num_frames // 16 for number in range(16)]
    assert np.allclose(segment.times_s, [float(number * num_frames // 16 / rate) for number in range(16)], atol=1e-3)


def test_a_cut_off_recording_without_a_length_still_raises_after_its_whole_segments(decoder, make_video):
    noise = np.random.default_rng(0).integers(0, 256, (40, 48, 64, 3), dtype=np.uint8)
    whole = make_video([], frames=list(noise), kind="flv", codec="libx264").read_bytes()
    with pytest.raises(DecodeError):
        list(decoder.video(whole[: len(whole) * 6 // 10], FIT, segment_s=1, frames_per_segment=2, from_start=True))


@pytest.mark.parametrize("pix_fmt", ["yuv420p", "yuvj420p", "yuv444p"])
def test_colours_survive_either_range(decoder, make_video, pix_fmt):
    colours = [(250, 10, 10), (10, 250, 10), (20, 40, 240), (255, 255, 255), (0, 0, 0)]
    path = make_video(colours, codec="libx264", kind="mkv", pix_fmt=pix_fmt, rate=1)
    (segment,) = segments_of(decoder, path, segment_s=5.0, frames_per_segment=5)
    assert np.abs(segment.pixels[:, 8, 8].astype(int) - colours).max() <= 6


QUARTERS = [(250, 0, 0), (0, 250, 0), (0, 0, 250), (250, 250, 0)]
TURNS = [  # degrees counter-clockwise, then mirrored: which stored corner is shown TL, TR, BL, BR
    (0, False, False, (0, 1, 2, 3)),
    (90, False, False, (1, 3, 0, 2)),
    (180, False, False, (3, 2, 1, 0)),
    (270, False, False, (2, 0, 3, 1)),
    (0, True, False, (1, 0, 3, 2)),
    (0, False, True, (2, 3, 0, 1)),
]


@pytest.mark.parametrize(("degrees", "hflip", "vflip", "shown"), TURNS)
@pytest.mark.parametrize("kind", ["mp4", "mov", "mkv"])
def test_rotation_flag_is_honoured(decoder, make_video, kind, degrees, hflip, vflip, shown):
    frame = np.zeros((48, 64, 3), np.uint8)
    for number, colour in enumerate(QUARTERS):
        frame[24 * (number // 2) :, 32 * (number % 2) :][:24, :32] = colour
    path = make_video(
        [], frames=[frame] * 3, kind=kind, prepare=lambda s: s.set_display_rotation(degrees, hflip=hflip, vflip=vflip)
    )
    pixels = decoder.frame_at(path, FIT, 0.0)
    found = [pixels[y, x].astype(int) for y in (3, 12) for x in (3, 12)]
    assert np.abs(np.array(found) - [QUARTERS[i] for i in shown]).max() <= 16


def test_rotation_turns_the_proportions_too(decoder, make_video):
    path = make_video(greys(3), size=(64, 32), prepare=lambda s: s.set_display_rotation(90))
    pixels = decoder.frame_at(path, ResizeSpec(32, "pad"), 0.0)
    assert pixels[0, 16].max() < 20
    assert pixels[16, 2].min() > 250


def test_pixels_that_are_not_square_are_widened(decoder, make_video):
    def prepare(stream):
        stream.codec_context.sample_aspect_ratio = 2

    path = make_video(greys(3), size=(32, 32), prepare=prepare)
    pixels = decoder.frame_at(path, ResizeSpec(32, "pad"), 0.0)  # shown 64 x 32: bars above and below
    assert pixels[2, 16].min() > 250
    assert pixels[16, 1].max() < 20


def test_alpha_of_a_video_is_laid_on_white(decoder, make_video):
    frame = np.zeros((48, 64, 4), np.uint8)
    frame[:, 32:, 3] = 255
    path = make_video([], frames=[frame], codec="png", kind="mov", pix_fmt="rgba")
    pixels = decoder.frame_at(path, FIT, 0.0)
    assert pixels[8, 2].tolist() == [255] * 3
    assert pixels[8, 13].tolist() == [0] * 3


def test_times_count_from_the_first_frame(decoder, make_video):
    path = make_video(greys(20), kind="mkv", codec="ffv1", pix_fmt="bgr0", pts=[1000 + i for i in range(20)])
    segments = segments_of(decoder, path, segment_s=1.0, frames_per_segment=2)
    assert [(s.start_s, s.end_s, frame_numbers(s)) for s in segments] == [(0, 1, [2, 7]), (1, 2, [12, 17])]


@pytest.mark.parametrize(
    ("kind", "codec"),
    [("mkv", "libx264"), ("webm", "libvpx-vp9"), ("asf", "wmv2"), ("mp4", "libx264"), ("ts", "libx264")],
)
def test_frames_are_spread_from_a_late_first_one_to_the_end(decoder, make_video, kind, codec):
    form = {"ts": "mpegts"}.get(kind, kind)
    path = make_video(greys(60, 4), codec=codec, kind=form, name=f"late.{kind}", pts=range(50, 110))
    (segment,) = segments_of(decoder, path, segment_s=20.0)
    assert (segment.start_s, segment.end_s, frame_numbers(segment, 4)) == (0, 6, [7, 22, 37, 52])


def test_a_slide_show_has_only_segments_in_which_a_slide_begins(decoder, make_video):
    path = make_video(greys(3, 80), kind="mkv", codec="ffv1", pix_fmt="bgr0", pts=[0, 5, 100])
    segments = segments_of(decoder, path, segment_s=1.0, frames_per_segment=2)
    assert [(s.segment, frame_numbers(s, 80)) for s in segments] == [(0, [0, 1]), (10, [2])]


def test_a_segment_length_without_exact_binary_form(decoder, make_video):
    segments = segments_of(decoder, make_video(greys(30)), segment_s=0.1, frames_per_segment=1)
    assert [s.segment for s in segments] == list(range(30))
    assert [frame_numbers(s) for s in segments] == [[i] for i in range(30)]


def test_odd_sizes_decode(decoder, make_video):
    path = make_video(greys(5), size=(37, 53), codec="ffv1", kind="mkv", pix_fmt="bgr0")
    assert segments_of(decoder, path)[0].pixels.shape == (4, 16, 16, 3)


def test_frame_at_shows_the_frame_of_that_time(decoder, make_video):
    path = make_video(greys(60, 4), codec="libx264", kind="mkv")
    for time_s, number in ((0, 0), (0.05, 0), (0.1, 1), (3.33, 33), (1.0, 10), (5.9, 59), (99, 59), (-1, 0)):
        assert round(float(decoder.frame_at(path, FIT, time_s).mean()) / 4) == number


@pytest.mark.parametrize(
    ("kind", "codec"), [("flv", "flv"), ("ts", "mpeg2video"), ("mkv", "libx264"), ("mp4", "mpeg4")]
)
def test_frame_at_counts_from_the_first_frame_whatever_its_time(decoder, make_video, kind, codec):
    form = {"ts": "mpegts"}.get(kind, kind)
    path = make_video(greys(60, 4), codec=codec, kind=form, name=f"late.{kind}", rate=25, pts=range(100, 160))
    for time_s, number in ((0, 0), (0.5, 12), (2.3, 57), (99, 59)):
        assert abs(float(decoder.frame_at(path, FIT, time_s).mean()) / 4 - number) < 1


@pytest.mark.parametrize(("kind", "codec", "pix_fmt"), KINDS)
def test_frame_at_agrees_with_the_segments(decoder, make_video, kind, codec, pix_fmt):
    path = make_video(greys(40), kind=kind, codec=codec, pix_fmt=pix_fmt)
    segments = segments_of(decoder, path, segment_s=1.0, frames_per_segment=1)
    for segment in segments:
        assert np.array_equal(decoder.frame_at(path, FIT, segment.start_s + 0.5), segment.pixels[0])


@pytest.mark.parametrize(("kind", "codec", "pix_fmt"), KINDS)
def test_a_clip_cut_off_in_the_middle_keeps_its_whole_segments(decoder, make_video, kind, codec, pix_fmt):
    noise = np.random.default_rng(0).integers(0, 256, (40, 48, 64, 3), dtype=np.uint8)
    path = make_video(
        [], frames=list(noise), kind=kind, codec=codec, pix_fmt=pix_fmt, options={"movflags": "faststart"}
    )
    whole = path.read_bytes()
    complete = segments_of(decoder, whole, segment_s=1.0, frames_per_segment=2)
    segments, error = until_error(decoder, whole[: len(whole) * 6 // 10])
    assert [s.segment for s in segments] == [0, 1][: len(segments)]
    assert 1 <= len(segments) <= 2
    assert all(np.array_equal(a.pixels, b.pixels) for a, b in zip(segments, complete, strict=False))
    assert not error.transient


def test_a_damaged_packet_ends_the_clip_after_its_whole_segments(decoder, make_video):
    noise = np.random.default_rng(0).integers(0, 256, (40, 48, 64, 3), dtype=np.uint8)
    whole = bytearray(make_video([], frames=list(noise), options={"movflags": "faststart"}).read_bytes())
    middle = len(whole) * 6 // 10
    whole[middle : middle + 500] = b"\xff" * 500
    segments, error = until_error(decoder, bytes(whole))
    assert [s.segment for s in segments] == [0, 1]
    assert error.error_type in ("DamagedVideo", "InvalidDataError")


def test_a_file_that_lacks_only_what_follows_its_last_frame_is_whole(decoder, make_video):
    whole = make_video(greys(30), kind="mkv", codec="ffv1", pix_fmt="bgr0").read_bytes()
    assert len(segments_of(decoder, whole[:-10], segment_s=1.0)) == 3  # the index stands at the end


def test_a_duration_that_lies_is_no_error(decoder, make_video):
    whole = bytearray(make_video(greys(20), kind="mkv", codec="ffv1", pix_fmt="bgr0").read_bytes())
    at = whole.index(b"\x44\x89\x88") + 3  # Matroska's Duration, a double in milliseconds
    for lie_ms in (1.0, 1500.0, 3.6e6):
        whole[at : at + 8] = np.array([lie_ms], ">f8").tobytes()
        segments = segments_of(decoder, bytes(whole), segment_s=1.0, frames_per_segment=2)
        assert [(s.start_s, s.end_s) for s in segments] == [(0, 1), (1, 2)]


@pytest.mark.parametrize(
    "rubbish", [b"", b"not a video", b"\x00\x00\x00\x20ftypisom" + b"\0" * 200, b"\x1a\x45\xdf\xa3webm"]
)
def test_what_is_no_video_is_refused(decoder, rubbish):
    segments, error = until_error(decoder, rubbish)
    assert segments == []
    assert error.error_type == ("EmptyFile" if not rubbish else error.error_type)
    assert not error.transient


def test_sound_alone_is_no_video(decoder, tmp_path):
    path = tmp_path / "song.m4a"
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=44100)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 44100), np.int16), format="s16", layout="mono")
        frame.sample_rate = 44100
        for packet in [*stream.encode(frame), *stream.encode()]:
            container.mux(packet)
    assert until_error(decoder, path)[1].error_type == "NoVideoStream"


def test_cover_art_is_no_video(decoder, tmp_path):
    path = tmp_path / "song.mp4"
    with av.open(str(path), "w", format="mp4") as container:
        sound = container.add_stream("aac", rate=44100)
        cover = container.add_stream("mjpeg", rate=1)
        cover.width = cover.height = 64
        cover.pix_fmt = "yuvj420p"
        cover.disposition = av.stream.Disposition.attached_pic
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 44100), np.int16), format="s16", layout="mono")
        frame.sample_rate = 44100
        image = av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8))
        for packet in [*cover.encode(image), *cover.encode(), *sound.encode(frame), *sound.encode()]:
            container.mux(packet)
    with av.open(str(path)) as container:
        assert container.streams.video[0].disposition & av.stream.Disposition.attached_pic
    assert until_error(decoder, path)[1].error_type == "NoVideoStream"


def test_frames_over_the_pixel_limit_are_refused(make_video):
    path = make_video(greys(3), size=(640, 480))
    with SandboxedDecoder(DecodeLimits(max_pixels=640 * 480 - 1)) as small:
        assert until_error(small, path)[1].error_type == "TooManyPixels"
    with SandboxedDecoder(DecodeLimits(max_pixels=640 * 480)) as enough:
        assert len(segments_of(enough, path)) == 1


PLAYLISTS = {
    "ffconcat": "ffconcat version 1.0\nfile {name}\n",
    "hls": "#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\n{name}\n#EXT-X-ENDLIST\n",
    "sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\n"
    "m=video 5004 RTP/AVP 96\na=rtpmap:96 H264/90000\n",
    "dash": "<?xml version='1.0'?><MPD xmlns='urn:mpeg:dash:schema:mpd:2011'><BaseURL>{name}</BaseURL></MPD>",
}


@pytest.mark.parametrize("playlist", PLAYLISTS)
@pytest.mark.parametrize("as_bytes", [False, True])
def test_playlists_never_open_a_neighbour(decoder, make_video, tmp_path, playlist, as_bytes):
    neighbour = make_video(greys(20), name="neighbour.mp4")
    hostile = tmp_path / "innocent.mp4"
    hostile.write_text(PLAYLISTS[playlist].format(name=neighbour.name))
    segments, error = until_error(decoder, hostile.read_bytes() if as_bytes else hostile)
    assert segments == []
    assert not error.transient  # refused at once, no time-out


@pytest.mark.parametrize("playlist", ["ffconcat", "hls", "dash"])
def test_playlists_never_make_a_request(decoder, tmp_path, playlist):
    calls = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.4)

        def listen():
            with suppress(TimeoutError):
                calls.append(server.accept())

        listener = threading.Thread(target=listen)
        listener.start()
        hostile = tmp_path / "innocent.mp4"
        hostile.write_text(PLAYLISTS[playlist].format(name=f"http://127.0.0.1:{server.getsockname()[1]}/x.mp4"))
        until_error(decoder, hostile)
        listener.join()
    assert calls == []


@pytest.mark.parametrize(
    "name",
    ["http:__127.0.0.1_x.mp4", "concat:a|b.mp4", "-i.mp4", "%03d.mp4", "pipe:0", "a\nb.mp4", os.fsdecode(b"\xff.mp4")],
)
def test_file_names_are_only_names(decoder, make_video, tmp_path, name):
    path = make_video(greys(10)).rename(tmp_path / name)
    assert len(segments_of(decoder, path)) == 1


def test_real_frames_are_fitted_like_images(decoder, make_video, encode_image):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8))
    path = make_video([], frames=[np.asarray(image)], codec="ffv1", kind="mkv", pix_fmt="bgr0")
    for resize in ("squash", "crop", "pad"):
        for resampler in ("pillow", "torchvision"):
            fit = ResizeSpec(24, resize, "bicubic", resampler=resampler)
            assert np.array_equal(decoder.frame_at(path, fit, 0), decoder.image(encode_image(image, "PNG"), fit))
