"""Cost of a hostile file: itself and a bounded time, and nothing of its neighbours or of the machine."""

import os
import signal
import struct
import tempfile
import time
import zlib
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from library_versions import is_older
from PIL import Image
from sandbox_checks import FIT, ORANGE, chunk, has_ended, is_orange, png_bomb, refused, while_decoding

from embedder.media.limits import DecodeLimits
from embedder.media.media_errors import DecodeError
from embedder.media.resize import ResizeSpec
from embedder.media.sandbox import SandboxedDecoder
from embedder.process import child_main

SHARED = Path(__file__).parents[3].parent / "shared" / "data"


def header_bombs(encode_image):
    small = Image.new("RGB", (16, 16), "red")
    jpeg = bytearray(encode_image(small, "JPEG"))
    at = jpeg.index(b"\xff\xc0") + 5
    jpeg[at : at + 4] = struct.pack(">HH", 65_500, 65_500)
    yield "JPEG", bytes(jpeg)
    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    yield (
        "PNG",
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 100))
        + chunk(b"IEND", b""),
    )
    gif = bytearray(encode_image(small, "GIF"))
    gif[6:10] = struct.pack("<HH", 65_535, 65_535)
    yield "GIF", bytes(gif)
    bmp = bytearray(encode_image(small, "BMP"))
    bmp[18:26] = struct.pack("<ii", 60_000, 60_000)
    yield "BMP", bytes(bmp)
    tiff = bytearray(encode_image(small, "TIFF"))
    directory = struct.unpack("<I", tiff[4:8])[0]
    for entry in range(struct.unpack("<H", tiff[directory : directory + 2])[0]):
        start = directory + 2 + 12 * entry
        if struct.unpack("<H", tiff[start : start + 2])[0] in (256, 257):
            tiff[start + 2 : start + 12] = struct.pack("<HII", 4, 1, 60_000)
    yield "TIFF", bytes(tiff)
    canvas = struct.pack("<I", 16_383)[:3] * 2
    frames = encode_image(small, "WEBP", save_all=True, append_images=[Image.new("RGB", (16, 16), "blue")])
    webp = bytearray(frames)
    assert webp[12:16] == b"VP8X"
    webp[24:30] = canvas
    yield "WEBP", bytes(webp)


def test_without_files_in_memory_pictures_pass_through_the_temporary_folder(monkeypatch, tmp_path, png):
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.delattr(os, "preadv")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with SandboxedDecoder(DecodeLimits()) as decoder:
        assert is_orange(decoder.image(png, FIT))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("platform", ["darwin", "linux"])
def test_a_system_that_refuses_limits_of_memory_is_let_go_on_unless_it_is_linux(monkeypatch, platform):
    def refuse(kind, limits):
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(child_main.resource, "setrlimit", refuse)
    monkeypatch.setattr(child_main.sys, "platform", platform)
    with pytest.raises(ValueError) if platform == "linux" else nullcontext():
        child_main.bound_memory(1 << 40)


def test_headers_of_huge_dimensions_are_refused_before_decoding(decoder, encode_image, png):
    for kind, bomb in header_bombs(encode_image):
        error = refused(decoder, bomb)
        is_libwebps = kind == "WEBP" and is_older("pillow", "13")  # which makes a decoder before it knows the size
        assert error.error_type == ("OSError" if is_libwebps else "TooManyPixels"), (kind, error)
        assert is_orange(decoder.image(png, FIT))


def test_reduced_jpegs_are_counted_after_the_reduction(encode_image):
    whole, larger = (encode_image(Image.new("RGB", (side, 1600), ORANGE), "JPEG") for side in (1600, 1601))
    with SandboxedDecoder(DecodeLimits(max_pixels=200 * 200)) as decoder:
        for fit in (ResizeSpec(16), ResizeSpec(16, reduced_decode=True), ResizeSpec(224, reduced_decode=True)):
            assert np.abs(decoder.image(whole, fit).astype(int) - ORANGE).max() < 9
            assert refused(decoder, larger, fit).error_type == "TooManyPixels"


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"])
def test_other_images_are_decoded_whole_up_to_twice_the_limit_and_halved(encode_image, kind):
    exact, larger = (encode_image(Image.new("RGB", (side, 200), ORANGE), kind) for side in (400, 401))
    with SandboxedDecoder(DecodeLimits(max_pixels=200 * 200)) as decoder:
        assert np.abs(decoder.image(exact, FIT).astype(int) - ORANGE).max() < 9
        assert refused(decoder, larger).error_type == "TooManyPixels"


def decode_one(decoder, source):
    try:
        return decoder.image(source, FIT)
    except DecodeError as error:
        return error


def decode_each(decoder, sources):
    """Pixels of each image, or what it failed with."""
    return [decode_one(decoder, source) for source in sources]


def decode_together(decoder, sources):
    found = decoder.images([(source, FIT) for source in sources])
    return [each if isinstance(each, DecodeError) else each.pixels for each in found]


by_itself_and_together = pytest.mark.parametrize("decode", [decode_each, decode_together])


def check_neighbours(found, number):
    """Check all images but one; give what came of that one."""
    assert all(is_orange(each) for place, each in enumerate(found) if place != number)
    return found[number]


@by_itself_and_together
def test_a_memory_bomb_costs_itself_alone(decode, slow_png, png):
    with SandboxedDecoder(DecodeLimits(memory_bytes=96 << 20)) as decoder:
        error = check_neighbours(decode(decoder, [png, png, slow_png, png]), 2)
    assert (error.error_type, error.transient) == ("MemoryError", False)
    assert "memory_bytes" in error.message


@pytest.mark.medium
def test_a_video_that_needs_too_much_memory_costs_itself_alone(make_video, png):
    path = make_video([(9, 9, 9)] * 3, size=(4096, 4096), codec="mjpeg", kind="mov", pix_fmt="yuvj420p")
    with SandboxedDecoder(DecodeLimits(memory_bytes=180 << 20)) as decoder:
        with pytest.raises(DecodeError) as caught:
            list(decoder.video(path, FIT, segment_s=1, frames_per_segment=1))
        assert not caught.value.transient
        assert is_orange(decoder.image(png, FIT))


def test_large_files_are_refused_as_bytes_and_as_files(tmp_path, png):
    path = tmp_path / "large.png"
    path.write_bytes(png + b"\0" * 1000)
    with SandboxedDecoder(DecodeLimits(max_file_bytes=1000)) as decoder:
        assert refused(decoder, path).error_type == "FileTooLarge"
        assert refused(decoder, path.read_bytes()).error_type == "FileTooLarge"
        assert is_orange(decoder.image(png, FIT))


@pytest.mark.medium
@by_itself_and_together
def test_a_decoder_that_hangs_is_ended_in_time_and_the_next_file_decodes(decode, png):
    with SandboxedDecoder(DecodeLimits(timeout_s=0.5)) as decoder:
        decode(decoder, [png, png])
        hung = decoder.child_pid
        os.kill(hung, signal.SIGSTOP)
        error = check_neighbours(decode(decoder, [png] * 4), 0)
        assert (error.error_type, error.transient) == ("TimeoutError", True)
        assert has_ended(hung)


@pytest.mark.medium
@by_itself_and_together
def test_slow_images_are_ended_in_time(decode, png):
    slow = png_bomb(20_000, 20_000)
    with SandboxedDecoder(DecodeLimits(timeout_s=0.5, max_pixels=1 << 29)) as decoder:
        decode(decoder, [png, png])
        found = decode(decoder, [png, slow, slow, png])
    assert [each.error_type for each in found[1:3]] == ["TimeoutError"] * 2
    assert is_orange(found[0]) and is_orange(found[3])


@pytest.mark.medium
@by_itself_and_together
def test_a_decoder_killed_once_gets_a_second_chance(decode, slow_png, png):
    with SandboxedDecoder() as decoder:
        decode(decoder, [png, png])
        first = decoder.child_pid
        with while_decoding(decoder, lambda pid: pid == first and os.kill(pid, signal.SIGKILL), every_s=0.03):
            found = decode(decoder, [png, slow_png, png])
        assert (check_neighbours(found, 1) == 255).all()
        assert decoder.child_pid not in (None, first)


@pytest.mark.medium
@by_itself_and_together
def test_a_file_that_kills_its_decoder_every_time_is_blamed(decode, png):
    endless = png_bomb(20_000, 20_000)  # seconds, many times the pause between two signals
    with SandboxedDecoder(DecodeLimits(max_pixels=1 << 29)) as decoder:
        decode(decoder, [png, png])
        with while_decoding(decoder, lambda pid: os.kill(pid, signal.SIGSEGV), every_s=0.3):
            error = check_neighbours(decode(decoder, [png, png, endless, png]), 2)
        assert (error.error_type, error.transient) == ("DecoderCrashed", False)
        assert "SIGSEGV" in error.message
        assert ".py" in error.message  # where it crashed, from the child's last words


def test_a_decoder_killed_from_outside_each_time_may_be_tried_again(slow_png, png):
    """SIGKILL comes from no decoder: the machine ran out of memory, or a user sent it."""
    with SandboxedDecoder() as decoder:
        decoder.image(png, FIT)
        with while_decoding(decoder, lambda pid: os.kill(pid, signal.SIGKILL), every_s=0.15):
            error = refused(decoder, slow_png)
    assert (error.error_type, error.transient) == ("DecoderCrashed", True)
    assert "SIGKILL" in error.message


@pytest.mark.medium
def test_a_child_that_died_while_idle_is_replaced_unnoticed(png):
    with SandboxedDecoder() as decoder:
        for _ in range(3):
            assert is_orange(decoder.image(png, FIT))
            os.kill(decoder.child_pid, signal.SIGKILL)
            time.sleep(0.02)


@pytest.mark.medium
def test_a_decoder_killed_in_the_middle_of_a_video_goes_on_where_it_was(make_video):
    path = make_video([(5 * i,) * 3 for i in range(50)])
    with SandboxedDecoder() as decoder:
        whole = list(decoder.video(path, FIT, segment_s=1, frames_per_segment=2))
        got = []
        for segment in decoder.video(path, FIT, segment_s=1, frames_per_segment=2):
            got.append(segment)
            if len(got) == 2:
                os.kill(decoder.child_pid, signal.SIGKILL)
    assert [s.segment for s in got] == [0, 1, 2, 3, 4]
    assert all(np.array_equal(a.pixels, b.pixels) for a, b in zip(got, whole, strict=True))


@pytest.mark.medium
def test_a_video_that_hangs_keeps_its_whole_segments(make_video, png):
    path = make_video([(5 * i,) * 3 for i in range(50)])
    with SandboxedDecoder(DecodeLimits(timeout_s=3)) as decoder:
        assert is_orange(decoder.image(png, FIT))  # the child has started: on a busy machine that takes seconds
        got = []
        with pytest.raises(DecodeError) as caught:
            for segment in decoder.video(path, FIT, segment_s=1, frames_per_segment=2):
                got.append(segment)
                if len(got) == 2:
                    os.kill(decoder.child_pid, signal.SIGSTOP)
        assert caught.value.transient
        assert 2 <= len(got) <= 3  # one may lie ready when the child is stopped
        assert is_orange(decoder.image(png, FIT))


@pytest.mark.medium
def test_a_long_video_ends_by_its_own_limit_which_does_not_count_the_reader(make_video):
    path = make_video([(5, 5, 5)] * 2000, rate=100)

    def read(limit_s, pause_s=0.0):
        with SandboxedDecoder(DecodeLimits(video_timeout_s=limit_s)) as decoder:
            for _ in decoder.video(path, FIT, segment_s=1, frames_per_segment=1):
                time.sleep(pause_s)

    with pytest.raises(DecodeError, match="whole video"):
        read(0.02)
    read(1.2, pause_s=0.07)  # 20 segments: 1.4 s of the reader's time


def test_an_abandoned_video_does_not_disturb_the_next_file(make_video, png):
    path = make_video([(5 * i,) * 3 for i in range(50)])
    with SandboxedDecoder() as decoder:
        segments = decoder.video(path, FIT, segment_s=1, frames_per_segment=2)
        next(segments)
        assert is_orange(decoder.image(png, FIT))
        with pytest.raises(RuntimeError, match="over"):
            next(segments)
        for segment in decoder.video(path, FIT, segment_s=1, frames_per_segment=2):
            if segment.segment == 1:
                break
        assert len(list(decoder.video(path, FIT, segment_s=1, frames_per_segment=2))) == 5


def test_a_call_that_was_interrupted_leaves_no_answer_for_the_next(slow_png, png):
    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with SandboxedDecoder() as decoder:
            decoder.image(png, FIT)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(KeyboardInterrupt):
                decoder.image(slow_png, FIT)
            assert is_orange(decoder.image(png, FIT))
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.medium
def test_memory_of_a_video_does_not_grow_with_its_length(make_video):
    def peak_kib(seconds):
        path = make_video([(9, 9, 9)] * (10 * seconds), size=(320, 240), name=f"{seconds}.mp4")
        with SandboxedDecoder() as decoder:
            assert len(list(decoder.video(path, ResizeSpec(224), segment_s=1, frames_per_segment=4))) == seconds
            status = Path(f"/proc/{decoder.child_pid}/status").read_text()
            return int(status.split("VmHWM:")[1].split()[0])

    assert peak_kib(40) < peak_kib(8) + 4096


@pytest.mark.parametrize("unreadable", ["missing.png", ".", "pipe", "nul\0byte"])
def test_what_is_no_readable_file_is_refused_at_once(decoder, tmp_path, unreadable):
    os.mkfifo(tmp_path / "pipe")
    error = refused(decoder, tmp_path / unreadable)
    assert error.error_type in ("FileNotFoundError", "NotAFile", "ValueError")
    assert error.transient == (error.error_type != "NotAFile")
    assert refused(decoder, Path("/dev/zero")).error_type == "NotAFile"


def test_a_relative_path_means_the_callers_folder(decoder, tmp_path, png, monkeypatch):
    decoder.image(png, FIT)  # the child is started in another folder
    (tmp_path / "here.png").write_bytes(png)
    monkeypatch.chdir(tmp_path)
    assert is_orange(decoder.image(Path("here.png"), FIT))


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no shared data at {SHARED}")
def test_real_photos_and_clips_all_decode(decoder):
    photos = sorted((SHARED / "photos").iterdir())
    for number, photo in enumerate(photos[::5]):
        pixels = decoder.image(photo, ResizeSpec(64, reduced_decode=number % 2 == 0))
        assert pixels.shape == (64, 64, 3)
        assert pixels.std() > 5
    num_segments = {
        clip.name: len(list(decoder.video(clip, ResizeSpec(64), segment_s=5.0, frames_per_segment=4)))
        for clip in sorted((SHARED / "video").iterdir())
    }
    assert num_segments == {"flipping_a_pancake.mkv": 3, "video_0.mov": 1, "video_90.mov": 1}


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no shared data at {SHARED}")
def test_a_real_rotation_flag_turns_the_clip_upright(decoder):
    upright, turned = (
        decoder.frame_at(SHARED / "video" / name, ResizeSpec(64, "pad"), 0.0)
        for name in ("video_0.mov", "video_90.mov")
    )
    assert upright[2, 32].min() > 250  # 16:9, with bars above and below
    assert upright[32, 2].max() < 200
    assert turned[32, 2].min() > 250  # 9:16, with bars left and right
    assert turned[2, 32].max() < 200
