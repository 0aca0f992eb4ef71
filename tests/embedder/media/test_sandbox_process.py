"""Process of the sandbox: its start, its end, and what it holds and shares."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from PIL import Image
from sandbox_checks import FIT, has_ended, is_orange, refused, wait_until

from embedder.media.decoder_process import receive
from embedder.media.limits import DecodeLimits
from embedder.media.media_errors import DecodeError
from embedder.media.sandbox import SandboxedDecoder
from embedder.process.child import ChildDiedError, ChildProcess


def test_several_decoders_work_in_threads_that_come_and_go(encode_image):
    """A child must outlive the thread that started it, and die with its decoder."""
    colours = [(40 * i, 10, 250 - 40 * i) for i in range(4)]
    decoders = [SandboxedDecoder() for _ in colours]
    wrong = []

    def use(decoder, colour):
        encoded = encode_image(Image.new("RGB", (30, 30), colour), "PNG")
        wrong.extend(1 for _ in range(20) if not (decoder.image(encoded, FIT) == colour).all())

    pids = None
    for _ in range(2):
        threads = [threading.Thread(target=use, args=pair) for pair in zip(decoders, colours, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert pids in (None, [decoder.child_pid for decoder in decoders])  # the same children as in the first round
        pids = [decoder.child_pid for decoder in decoders]
    for decoder in decoders:
        decoder.close()
    assert wrong == []
    assert all(has_ended(pid) for pid in pids)


@pytest.mark.parametrize(
    "sent",
    [b"nonsense", b"3", b"[" * 200_000, b"[" * 900 + b"]" * 900, b"{}", b'"' + b"x" * (1 << 20) + b'"'],
    ids=["nonsense", "number", "endless", "deep", "another kind", "large"],
)
def test_a_broken_message_of_the_child_is_its_end(tmp_path, sent):
    server = tmp_path / "server.py"
    kind = b"X" if sent == b"{}" else b"J"
    server.write_text(f"def serve(channel):\n    channel.send({kind!r}, {sent!r})\n    channel.receive()\n")
    child = ChildProcess([sys.executable, "-I"], server, {})
    try:
        with pytest.raises(ChildDiedError):
            receive(child, 10)
    finally:
        child.kill()


PARENT = """
import sys, time
from embedder.media.sandbox import SandboxedDecoder
from embedder.media.resize import ResizeSpec
decoder = SandboxedDecoder()
decoder.image(bytes.fromhex(sys.argv[1]), ResizeSpec(8))
print(decoder.child_pid, flush=True)
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


@pytest.mark.medium
def test_a_parent_that_forgets_to_close_its_decoder_ends_quietly_with_its_child(png):
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", PARENT, png.hex(), "end"], capture_output=True, text=True, check=True
    )
    assert ended.stderr == ""
    wait_until(lambda: has_ended(int(ended.stdout)))


def test_ctrl_c_and_sigterm_to_the_whole_group_leave_the_child_at_work(decoder, png):
    decoder.image(png, FIT)
    child = decoder.child_pid
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(child, number)
        assert is_orange(decoder.image(png, FIT))
    assert decoder.child_pid == child


def test_the_child_holds_none_of_the_parents_files(decoder, tmp_path, png):
    with (tmp_path / "secret").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        decoder.close()
        decoder.image(png, FIT)
        held = [str(entry.readlink()) for entry in Path(f"/proc/{decoder.child_pid}/fd").iterdir()]
    assert len(held) == 7, held  # no input, output, last words, lifeline, channel, inbox, outbox
    assert not any("secret" in name for name in held)


@pytest.mark.medium
def test_two_hundred_files_leak_nothing(slow_png, png, make_video):
    clip = make_video([(5 * i,) * 3 for i in range(20)])

    def open_files():
        return sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208

    with SandboxedDecoder(DecodeLimits(max_file_bytes=64 << 20)) as decoder:
        decoder.image(png, FIT)
        before = open_files()
        for number in range(200):
            if number % 50 == 10:
                os.kill(decoder.child_pid, signal.SIGKILL)
            if number % 20 == 5:
                refused(decoder, png[:30])
            if number % 40 == 7:
                list(decoder.video(clip, FIT, segment_s=1, frames_per_segment=2))
            assert is_orange(decoder.image(png, FIT))
        assert open_files() == before
        held_by_child = len(list(Path(f"/proc/{decoder.child_pid}/fd").iterdir()))
        assert held_by_child == 7
        refused(decoder, b"\0" * (40 << 20))
        files = Path(f"/proc/{decoder.child_pid}/fd").iterdir()
        shared = [file.stat().st_size for file in files if "memfd" in str(file.readlink())]
        assert len(shared) == 2
        assert max(shared) < 1 << 20  # a large file's memory was given back
    assert len(open_files()) == len(before) - 5  # inbox, outbox, channel, lifeline, last words


def test_the_child_imports_nothing_heavy(decoder, png):
    decoder.image(png, FIT)
    maps = Path(f"/proc/{decoder.child_pid}/maps").read_text()
    assert "_imaging" in maps
    assert not any(name in maps for name in ("numpy", "_imagingcms", "libavcodec", "torch", "pyarrow", "libpydantic"))


def test_a_child_that_cannot_start_is_nobodys_reject(png):
    with (
        SandboxedDecoder(DecodeLimits(memory_bytes=20 << 20)) as decoder,
        pytest.raises(RuntimeError, match="memory_bytes"),
    ):
        decoder.image(png, FIT)


def test_errors_can_be_sent_between_processes():
    import pickle

    error = pickle.loads(pickle.dumps(DecodeError("TimeoutError", "too long", transient=True)))
    assert (error.error_type, error.message, error.transient, str(error)) == (
        "TimeoutError",
        "too long",
        True,
        "TimeoutError: too long",
    )


def test_messages_of_hostile_files_are_one_short_line(decoder, encode_image):
    for data in (b"\xff\xd8\xff\xe0" + b"\n" * 5000, b"II*\0" + b"\n" * 5000, b"GIF89a" + b"\r\n" * 900):
        message = refused(decoder, data).message
        assert len(message) <= 500
        assert json.dumps(message).count("\\n") == 0
