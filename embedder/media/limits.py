"""Limits on the cost of one file."""

from dataclasses import dataclass

PROGRESS_BYTES = 8
"""Start of the sandbox's outbox in a batch: the number of the current image, which is blamed for a crash."""

MAX_RANGE_BYTES = 8 << 20
"""Most of a file that passes to the sandbox at a time while a header is read."""


@dataclass(frozen=True)
class DecodeLimits:
    """Limits on the decoding of one file; a file beyond them is refused, or its sandbox process killed.

    `timeout_s` is wall clock for one image or segment, `video_timeout_s` for a whole video without the caller's time.
    `memory_bytes` is address space: 140 MiB are used before the first video, 160 with the first HEIC, 80 more with the
    torchvision resampler, and 430 with PyTorch's kernel if 1 GiB is left. Beyond `max_pixels`, a JPEG is decoded at
    1/2, 1/4 or 1/8, and another image of up to twice as many is halved after decoding. Videos are streamed;
    `max_video_bytes` exists because they are read whole for their hash.
    """

    timeout_s: float = 30.0
    video_timeout_s: float = 3600.0
    memory_bytes: int = 4 << 30
    max_pixels: int = 100_000_000
    max_file_bytes: int = 512 << 20
    max_video_bytes: int = 16 << 30
