"""Checks of a sandboxed decoder and its process."""

import struct
import threading
import time
import zlib
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from embedder.media.media_errors import DecodeError
from embedder.media.resize import ResizeSpec

FIT = ResizeSpec(16)
ORANGE = (250, 120, 10)


def is_orange(pixels):
    """Whether all pixels are those of the fixture `png`."""
    return (pixels == ORANGE).all()


def refused(decoder, source, fit=FIT):
    """Error with which a decoder refuses a source."""
    with pytest.raises(DecodeError) as caught:
        decoder.image(source, fit)
    return caught.value


def has_ended(pid):
    """Whether a process is gone, or a zombie without a waiting parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(condition, timeout_s=60.0):
    """Wait until a condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@contextmanager
def while_decoding(decoder, act, every_s):
    """Call `act(pid)` again and again, each time some while after the decoder's child was seen."""
    done = threading.Event()

    def run():
        while not done.wait(every_s):
            if (pid := decoder.child_pid) is not None:
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
    """Encode a chunk of a PNG."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_bomb(width, height):
    """Encode a small white PNG with true dimensions."""
    rows = zlib.compressobj(9)
    data = b"".join(rows.compress(b"\0" + b"\xff" * width) for _ in range(height)) + rows.flush()
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
