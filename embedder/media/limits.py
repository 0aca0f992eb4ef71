"""Limits on the cost of one file."""

from dataclasses import dataclass

PROGRESS_BYTES = 8
"""Start of the sandbox's outbox in a batch: the number of the current image, which is blamed for a crash."""


@dataclass(frozen=True)
class DecodeLimits:
    """Limits on the decoding of one file; a file beyond them is refused, or its sandbox process killed.

    Attributes:
        timeout_s: wall clock for one image, or for one segment of a video.
        video_timeout_s: wall clock for one whole video, without the time that the caller spends between segments.
        memory_bytes: address space of the sandbox process; about 140 MiB are used before the first video, 160 with the
            first HEIC, 80 more with the torchvision resampler, and 430 with PyTorch's kernel if 1 GiB is left.
        max_pixels: pixels of one image or frame. A larger JPEG is decoded at 1/2, 1/4 or 1/8 of its sides, another
            image of up to twice as many is decoded whole and then halved; anything larger is refused.
        max_file_bytes: encoded size of one image; videos are streamed.
        max_video_bytes: encoded size of one video; it is read whole, to detect changes by its hash.
    """

    timeout_s: float = 30.0
    video_timeout_s: float = 3600.0
    memory_bytes: int = 4 << 30
    max_pixels: int = 100_000_000
    max_file_bytes: int = 512 << 20
    max_video_bytes: int = 16 << 30
