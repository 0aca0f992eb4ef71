"""Clips with one plain frame for each colour."""

import multiprocessing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np

Colour = tuple[int, int, int]


def write_apart(path: Path, colours: Sequence[Colour], **how: Any) -> None:
    """Call `write` in its own process, which ends with it.

    Args:
        path: the file to write.
        colours: colours of the frames, in order.
        how: further arguments of `write`.

    SVT-AV1, the only AV1 encoder of PyAV, run by root puts the process that uses it under SCHED_FIFO 99, and with it
    all that the process starts later: such a process takes the machine from everything else.
    """
    process = multiprocessing.get_context("spawn").Process(target=write, args=(path, colours), kwargs=how)
    process.start()
    process.join(60)
    process.kill()
    if process.exitcode != 0:
        raise RuntimeError(f"{path}: the process that encodes it ended with {process.exitcode}")


def write(
    path: Path,
    colours: Sequence[Colour],
    *,
    codec: str,
    kind: str,
    rate: int = 10,
    pix_fmt: str = "yuv420p",
    size: tuple[int, int] = (64, 48),
    pts: Sequence[int] | None = None,
    options: dict[str, str] | None = None,
    frames: Sequence[np.ndarray] | None = None,
    prepare: Callable[[Any], None] | None = None,
) -> None:
    """Encode a clip.

    Args:
        path: the file to write.
        colours: colours of the frames, in order.
        codec: FFmpeg's name of an encoder.
        kind: container, by the usual suffix.
        rate: frames per second.
        pix_fmt: FFmpeg's name of a pixel format.
        size: width and height in pixels.
        pts: presentation times in frames; default: 0, 1, 2, ...
        options: options of the container.
        frames: pixels (height, width, 3 or 4) uint8, instead of plain colours.
        prepare: called with the stream before it is opened.
    """
    with av.open(str(path), "w", format={"mkv": "matroska"}.get(kind, kind), options=options or {}) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height = size
        stream.pix_fmt = pix_fmt
        stream.gop_size = 10
        if codec == "mpeg4":
            stream.bit_rate = 20_000_000  # so that plain greys keep their value
        stream.thread_count = 1
        if prepare is not None:
            prepare(stream)
        pixels = frames or [np.full((size[1], size[0], 3), colour, np.uint8) for colour in colours]
        for number, array in enumerate(pixels):
            frame = av.VideoFrame.from_ndarray(array, format="rgba" if array.shape[2] == 4 else "rgb24")
            frame.pts = pts[number] if pts else number
            for packet in stream.encode(frame):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
