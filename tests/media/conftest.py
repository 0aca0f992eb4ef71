"""Pictures and videos made in code, and a decoding door that the tests of one file share."""

import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from embedder.media.door import DecodeDoor
from embedder.media.limits import DecodeLimits

Colour = tuple[int, int, int]
SHARED = Path(__file__).parents[2].parent / "shared" / "data"


@pytest.fixture(scope="module")
def door() -> Iterator[DecodeDoor]:
    with DecodeDoor(DecodeLimits(timeout_s=30, memory_bytes=1 << 30)) as opened:
        yield opened


@pytest.fixture
def encode_picture() -> Callable[..., bytes]:
    """`encode_picture(image, "PNG", **options)` -> the file's bytes."""

    def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
        file = io.BytesIO()
        image.save(file, kind, **options)
        return file.getvalue()

    return encode


@pytest.fixture
def png(encode_picture: Callable[..., bytes]) -> bytes:
    """A good neighbour: an orange square."""
    return encode_picture(Image.new("RGB", (24, 24), (250, 120, 10)), "PNG")


@pytest.fixture
def make_video(tmp_path: Path) -> Callable[..., Path]:
    """`make_video([colour, ...], codec="mpeg4", kind="mp4")` -> a clip with one plain frame for each colour."""

    def make(
        colours: Sequence[Colour],
        *,
        rate: int = 10,
        codec: str = "mpeg4",
        kind: str = "mp4",
        pix_fmt: str = "yuv420p",
        size: tuple[int, int] = (64, 48),
        pts: Sequence[int] | None = None,
        name: str | None = None,
        options: dict[str, str] | None = None,
        frames: Sequence[np.ndarray] | None = None,
        prepare: Callable[[Any], None] = lambda stream: None,
    ) -> Path:
        path = tmp_path / (name or f"clip-{codec}.{kind}")
        with av.open(str(path), "w", format={"mkv": "matroska"}.get(kind, kind), options=options or {}) as container:
            stream = container.add_stream(codec, rate=rate)
            stream.width, stream.height = size
            stream.pix_fmt = pix_fmt
            stream.gop_size = 10
            if codec == "mpeg4":
                stream.bit_rate = 20_000_000  # so that plain greys keep their value
            stream.thread_count = 1
            prepare(stream)
            pixels = frames or [np.full((size[1], size[0], 3), colour, np.uint8) for colour in colours]
            for number, array in enumerate(pixels):
                frame = av.VideoFrame.from_ndarray(array, format="rgba" if array.shape[2] == 4 else "rgb24")
                frame.pts = pts[number] if pts else number
                for packet in stream.encode(frame):
                    container.mux(packet)
            for packet in stream.encode():
                container.mux(packet)
        return path

    return make
