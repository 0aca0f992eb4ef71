"""What one hostile file may cost: itself, a bounded time, and nothing of its neighbours or of the machine."""

import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import zlib
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from embedder.media.errors import DecodeError
from embedder.media.limits import DecodeLimits
from embedder.media.resize import ResizeSpec
from embedder.media.sandbox import SandboxedDecoder

FIT = ResizeSpec(16)
ORANGE = (250, 120, 10)
SHARED = Path(__file__).parents[3].parent / "shared" / "data"


def is_orange(pixels):
    return (pixels == ORANGE).all()


def refused(door, source, fit=FIT):
    with pytest.raises(DecodeError) as caught:
        door.picture(source, fit)
    return caught.value


def has_ended(pid):
    """Whether a process is gone, or a zombie that nobody collects."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@contextmanager
def while_decoding(door, act, every_s):
    """Call `act(pid)` again and again, each time some while after the door's child was seen."""
    done = threading.Event()

    def run():
        while not done.wait(every_s):
            if (pid := door.child_pid) is not None:
                with suppress(ProcessLookupError):
                    act(pid)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_bomb(width, height):
    """A small PNG that is honest about its size and white all over."""
    rows = zlib.compressobj(9)
    data = b"".join(rows.compress(b"\0" + b"\xff" * width) for _ in range(height)) + rows.flush()
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.fixture(scope="module")
def slow_png():
    """A picture that takes a good part of a second."""
    return png_bomb(9000, 9000)


def header_bombs(encode_picture):
    small = Image.new("RGB", (16, 16), "red")
    jpeg = bytearray(encode_picture(small, "JPEG"))
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
    gif = bytearray(encode_picture(small, "GIF"))
    gif[6:10] = struct.pack("<HH", 65_535, 65_535)
    yield "GIF", bytes(gif)
    bmp = bytearray(encode_picture(small, "BMP"))
    bmp[18:26] = struct.pack("<ii", 60_000, 60_000)
    yield "BMP", bytes(bmp)
    tiff = bytearray(encode_picture(small, "TIFF"))
    directory = struct.unpack("<I", tiff[4:8])[0]
    for entry in range(struct.unpack("<H", tiff[directory : directory + 2])[0]):
        start = directory + 2 + 12 * entry
        if struct.unpack("<H", tiff[start : start + 2])[0] in (256, 257):
            tiff[start + 2 : start + 12] = struct.pack("<HII", 4, 1, 60_000)
    yield "TIFF", bytes(tiff)
    canvas = struct.pack("<I", 16_383)[:3] * 2
    frames = encode_picture(small, "WEBP", save_all=True, append_images=[Image.new("RGB", (16, 16), "blue")])
    webp = bytearray(frames)
    assert webp[12:16] == b"VP8X"
    webp[24:30] = canvas
    yield "WEBP", bytes(webp)


def test_headers_of_huge_dimensions_are_refused_before_decoding(door, encode_picture, png):
    for kind, bomb in header_bombs(encode_picture):
        error = refused(door, bomb)
        assert error.error_type == "TooManyPixels", (kind, error)
        assert is_orange(door.picture(png, FIT))


def test_reduced_jpegs_are_counted_after_the_reduction(encode_picture):
    whole, larger = (encode_picture(Image.new("RGB", (side, 1600), ORANGE), "JPEG") for side in (1600, 1601))
    with SandboxedDecoder(DecodeLimits(max_pixels=200 * 200)) as door:
        for fit in (ResizeSpec(16), ResizeSpec(16, reduced_decode=True), ResizeSpec(224, reduced_decode=True)):
            assert np.abs(door.picture(whole, fit).astype(int) - ORANGE).max() < 9
            assert refused(door, larger, fit).error_type == "TooManyPixels"


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"])
def test_other_pictures_are_decoded_whole_up_to_twice_the_limit_and_halved(encode_picture, kind):
    exact, larger = (encode_picture(Image.new("RGB", (side, 200), ORANGE), kind) for side in (400, 401))
    with SandboxedDecoder(DecodeLimits(max_pixels=200 * 200)) as door:
        assert np.abs(door.picture(exact, FIT).astype(int) - ORANGE).max() < 9
        assert refused(door, larger).error_type == "TooManyPixels"


def test_a_memory_bomb_costs_itself_alone(png):
    bomb = png_bomb(9000, 9000)  # 81 million pixels, as many bytes once decoded
    with SandboxedDecoder(DecodeLimits(memory_bytes=96 << 20)) as door:
        assert is_orange(door.picture(png, FIT))
        error = refused(door, bomb)
        assert (error.error_type, error.transient) == ("MemoryError", False)
        assert "memory_bytes" in error.message
        assert is_orange(door.picture(png, FIT))


def test_a_video_that_needs_too_much_memory_costs_itself_alone(make_video, png):
    path = make_video([(9, 9, 9)] * 3, size=(4096, 4096), codec="mjpeg", kind="mov", pix_fmt="yuvj420p")
    with SandboxedDecoder(DecodeLimits(memory_bytes=180 << 20)) as door:
        with pytest.raises(DecodeError) as caught:
            list(door.video(path, FIT, segment_s=1, frames_per_segment=1))
        assert not caught.value.transient
        assert is_orange(door.picture(png, FIT))


def test_large_files_are_refused_as_bytes_and_as_files(tmp_path, png):
    path = tmp_path / "large.png"
    path.write_bytes(png + b"\0" * 1000)
    with SandboxedDecoder(DecodeLimits(max_file_bytes=1000)) as door:
        assert refused(door, path).error_type == "FileTooLarge"
        assert refused(door, path.read_bytes()).error_type == "FileTooLarge"
        assert is_orange(door.picture(png, FIT))


def test_a_decoder_that_hangs_is_ended_in_time_and_the_next_file_decodes(png):
    with SandboxedDecoder(DecodeLimits(timeout_s=0.5)) as door:
        door.picture(png, FIT)
        hung = door.child_pid
        os.kill(hung, signal.SIGSTOP)
        error = refused(door, png)
        assert (error.error_type, error.transient) == ("TimeoutError", True)
        assert has_ended(hung)
        assert is_orange(door.picture(png, FIT))


def test_a_slow_picture_is_ended_in_time(slow_png, png):
    with SandboxedDecoder(DecodeLimits(timeout_s=0.05)) as door:
        assert refused(door, slow_png).error_type == "TimeoutError"
    with SandboxedDecoder() as door:
        assert (door.picture(slow_png, FIT) == 255).all()


def test_a_decoder_killed_once_gets_a_second_chance(slow_png, png):
    with SandboxedDecoder() as door:
        door.picture(png, FIT)
        first = door.child_pid
        with while_decoding(door, lambda pid: pid == first and os.kill(pid, signal.SIGKILL), every_s=0.03):
            assert (door.picture(slow_png, FIT) == 255).all()
        assert door.child_pid not in (None, first)


def test_a_file_that_kills_its_decoder_every_time_is_blamed(slow_png, png):
    with SandboxedDecoder() as door:
        door.picture(png, FIT)
        with while_decoding(door, lambda pid: os.kill(pid, signal.SIGSEGV), every_s=0.15):
            error = refused(door, slow_png)
        assert (error.error_type, error.transient) == ("DecoderCrashed", False)
        assert "SIGSEGV" in error.message
        assert ".py" in error.message  # where it crashed, from the child's last words
        assert is_orange(door.picture(png, FIT))


def test_a_decoder_killed_from_outside_each_time_may_be_tried_again(slow_png, png):
    """SIGKILL comes from no decoder: the machine ran out of memory, or somebody sent it."""
    with SandboxedDecoder() as door:
        door.picture(png, FIT)
        with while_decoding(door, lambda pid: os.kill(pid, signal.SIGKILL), every_s=0.15):
            error = refused(door, slow_png)
    assert (error.error_type, error.transient) == ("DecoderCrashed", True)
    assert "SIGKILL" in error.message


def test_a_child_that_died_while_idle_is_replaced_unnoticed(png):
    with SandboxedDecoder() as door:
        for _ in range(3):
            assert is_orange(door.picture(png, FIT))
            os.kill(door.child_pid, signal.SIGKILL)
            time.sleep(0.02)


def test_a_decoder_killed_in_the_middle_of_a_video_goes_on_where_it_was(make_video):
    path = make_video([(5 * i,) * 3 for i in range(50)])
    with SandboxedDecoder() as door:
        whole = list(door.video(path, FIT, segment_s=1, frames_per_segment=2))
        got = []
        for segment in door.video(path, FIT, segment_s=1, frames_per_segment=2):
            got.append(segment)
            if len(got) == 2:
                os.kill(door.child_pid, signal.SIGKILL)
    assert [s.segment for s in got] == [0, 1, 2, 3, 4]
    assert all(np.array_equal(a.pixels, b.pixels) for a, b in zip(got, whole, strict=True))


def test_a_video_that_hangs_keeps_its_whole_segments(make_video, png):
    path = make_video([(5 * i,) * 3 for i in range(50)])
    with SandboxedDecoder(DecodeLimits(timeout_s=0.5)) as door:
        got = []
        with pytest.raises(DecodeError) as caught:
            for segment in door.video(path, FIT, segment_s=1, frames_per_segment=2):
                got.append(segment)
                if len(got) == 2:
                    os.kill(door.child_pid, signal.SIGSTOP)
        assert caught.value.transient
        assert 2 <= len(got) <= 3  # one may lie ready when the child is stopped
        assert is_orange(door.picture(png, FIT))


def test_a_long_video_ends_by_its_own_limit_which_does_not_count_the_reader(make_video):
    path = make_video([(5, 5, 5)] * 2000, rate=100)

    def read(limit_s, pause_s=0.0):
        with SandboxedDecoder(DecodeLimits(video_timeout_s=limit_s)) as door:
            for _ in door.video(path, FIT, segment_s=1, frames_per_segment=1):
                time.sleep(pause_s)

    with pytest.raises(DecodeError, match="whole video"):
        read(0.02)
    read(2.0, pause_s=0.11)  # 20 segments: 2.2 s of the reader's time


def test_an_abandoned_video_does_not_disturb_the_next_file(make_video, png):
    path = make_video([(5 * i,) * 3 for i in range(50)])
    with SandboxedDecoder() as door:
        segments = door.video(path, FIT, segment_s=1, frames_per_segment=2)
        next(segments)
        assert is_orange(door.picture(png, FIT))
        with pytest.raises(RuntimeError, match="over"):
            next(segments)
        for segment in door.video(path, FIT, segment_s=1, frames_per_segment=2):
            if segment.segment == 1:
                break
        assert len(list(door.video(path, FIT, segment_s=1, frames_per_segment=2))) == 5


def test_a_call_that_was_interrupted_leaves_no_answer_for_the_next(slow_png, png):
    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with SandboxedDecoder() as door:
            door.picture(png, FIT)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(KeyboardInterrupt):
                door.picture(slow_png, FIT)
            assert is_orange(door.picture(png, FIT))
    finally:
        signal.signal(signal.SIGALRM, before)


def test_memory_of_a_video_does_not_grow_with_its_length(make_video):
    def peak_kib(seconds):
        path = make_video([(9, 9, 9)] * (10 * seconds), size=(320, 240), name=f"{seconds}.mp4")
        with SandboxedDecoder() as door:
            assert len(list(door.video(path, ResizeSpec(224), segment_s=1, frames_per_segment=4))) == seconds
            status = Path(f"/proc/{door.child_pid}/status").read_text()
            return int(status.split("VmHWM:")[1].split()[0])

    assert peak_kib(80) < peak_kib(8) + 4096


@pytest.mark.parametrize("unreadable", ["missing.png", ".", "pipe", "nul\0byte"])
def test_what_is_no_readable_file_is_refused_at_once(door, tmp_path, unreadable):
    os.mkfifo(tmp_path / "pipe")
    error = refused(door, tmp_path / unreadable)
    assert error.error_type in ("FileNotFoundError", "NotAFile", "ValueError")
    assert error.transient == (error.error_type != "NotAFile")
    assert refused(door, Path("/dev/zero")).error_type == "NotAFile"


def test_a_relative_path_means_the_callers_folder(door, tmp_path, png, monkeypatch):
    door.picture(png, FIT)  # the child is started in another folder
    (tmp_path / "here.png").write_bytes(png)
    monkeypatch.chdir(tmp_path)
    assert is_orange(door.picture(Path("here.png"), FIT))


def test_several_doors_work_in_threads_that_come_and_go(encode_picture):
    """A child must outlive the thread that started it, and die with its door."""
    colours = [(40 * i, 10, 250 - 40 * i) for i in range(4)]
    doors = [SandboxedDecoder() for _ in colours]
    wrong = []

    def use(door, colour):
        encoded = encode_picture(Image.new("RGB", (30, 30), colour), "PNG")
        wrong.extend(1 for _ in range(20) if not (door.picture(encoded, FIT) == colour).all())

    pids = None
    for _ in range(2):
        threads = [threading.Thread(target=use, args=pair) for pair in zip(doors, colours, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert pids in (None, [door.child_pid for door in doors])  # the same children as in the first round
        pids = [door.child_pid for door in doors]
    for door in doors:
        door.close()
    assert wrong == []
    assert all(has_ended(pid) for pid in pids)


PARENT = """
import sys, time
from embedder.media.sandbox import SandboxedDecoder
from embedder.media.resize import ResizeSpec
door = SandboxedDecoder()
door.picture(bytes.fromhex(sys.argv[1]), ResizeSpec(8))
print(door.child_pid, flush=True)
time.sleep(60 if sys.argv[2] == "wait" else 0)
"""


@pytest.mark.parametrize("state", ["idle", "hung"])
def test_the_child_dies_with_a_killed_parent(png, state):
    with subprocess.Popen([sys.executable, "-c", PARENT, png.hex(), "wait"], stdout=subprocess.PIPE) as parent:
        child = int(parent.stdout.readline())
        if state == "hung":
            os.kill(child, signal.SIGSTOP)
        assert not has_ended(child)
        parent.kill()
        wait_until(lambda: has_ended(child))


def test_a_parent_that_forgets_to_close_its_door_ends_quietly_with_its_child(png):
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", PARENT, png.hex(), "end"], capture_output=True, text=True, check=True
    )
    assert ended.stderr == ""
    wait_until(lambda: has_ended(int(ended.stdout)))


def test_ctrl_c_and_sigterm_to_the_whole_group_leave_the_child_at_work(door, png):
    door.picture(png, FIT)
    child = door.child_pid
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(child, number)
        assert is_orange(door.picture(png, FIT))
    assert door.child_pid == child


def test_the_child_holds_none_of_the_parents_files(door, tmp_path, png):
    with (tmp_path / "secret").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        door.close()
        door.picture(png, FIT)
        held = [str(entry.readlink()) for entry in Path(f"/proc/{door.child_pid}/fd").iterdir()]
    assert len(held) == 6, held  # lifeline, nowhere, last words, control, inbox, outbox
    assert not any("secret" in name for name in held)


def test_two_hundred_files_leak_nothing(slow_png, png, make_video):
    clip = make_video([(5 * i,) * 3 for i in range(20)])

    def open_files():
        return sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208

    with SandboxedDecoder(DecodeLimits(max_file_bytes=64 << 20)) as door:
        door.picture(png, FIT)
        before = open_files()
        for number in range(200):
            if number % 50 == 10:
                os.kill(door.child_pid, signal.SIGKILL)
            if number % 20 == 5:
                refused(door, png[:30])
            if number % 40 == 7:
                list(door.video(clip, FIT, segment_s=1, frames_per_segment=2))
            assert is_orange(door.picture(png, FIT))
        assert open_files() == before
        held_by_child = len(list(Path(f"/proc/{door.child_pid}/fd").iterdir()))
        assert held_by_child == 6
        refused(door, b"\0" * (40 << 20))
        shared = [os.fstat(fd).st_size for fd in door._fds]
        assert max(shared) < 1 << 20  # a large file's memory was given back
    assert len(open_files()) == len(before) - 5  # inbox, outbox, control, lifeline, last words


def test_the_child_imports_nothing_heavy(door, png):
    door.picture(png, FIT)
    maps = Path(f"/proc/{door.child_pid}/maps").read_text()
    assert "_imaging" in maps
    assert not any(name in maps for name in ("numpy", "libavcodec", "torch", "pyarrow", "libpydantic"))


def test_a_child_that_cannot_start_is_nobodys_reject(png):
    with (
        SandboxedDecoder(DecodeLimits(memory_bytes=20 << 20)) as door,
        pytest.raises(RuntimeError, match="memory_bytes"),
    ):
        door.picture(png, FIT)


def test_errors_can_be_sent_between_processes():
    import pickle

    error = pickle.loads(pickle.dumps(DecodeError("TimeoutError", "too long", transient=True)))
    assert (error.error_type, error.message, error.transient, str(error)) == (
        "TimeoutError",
        "too long",
        True,
        "TimeoutError: too long",
    )


def test_messages_of_hostile_files_are_one_short_line(door, encode_picture):
    for data in (b"\xff\xd8\xff\xe0" + b"\n" * 5000, b"II*\0" + b"\n" * 5000, b"GIF89a" + b"\r\n" * 900):
        message = refused(door, data).message
        assert len(message) <= 500
        assert json.dumps(message).count("\\n") == 0


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no shared data at {SHARED}")
def test_real_photos_and_clips_all_decode(door):
    photos = sorted((SHARED / "photos").iterdir())
    for number, photo in enumerate(photos[::5]):
        pixels = door.picture(photo, ResizeSpec(64, reduced_decode=number % 2 == 0))
        assert pixels.shape == (64, 64, 3)
        assert pixels.std() > 5
    num_segments = {
        clip.name: len(list(door.video(clip, ResizeSpec(64), segment_s=5.0, frames_per_segment=4)))
        for clip in sorted((SHARED / "video").iterdir())
    }
    assert num_segments == {"flipping_a_pancake.mkv": 3, "video_0.mov": 1, "video_90.mov": 1}


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no shared data at {SHARED}")
def test_a_real_rotation_flag_turns_the_clip_upright(door):
    upright, turned = (
        door.frame_at(SHARED / "video" / name, ResizeSpec(64, "pad"), 0.0) for name in ("video_0.mov", "video_90.mov")
    )
    assert upright[2, 32].min() > 250  # 16:9, with bars above and below
    assert upright[32, 2].max() < 200
    assert turned[32, 2].min() > 250  # 9:16, with bars left and right
    assert turned[2, 32].max() < 200
