"""Decodes animated images (GIF, PNG, WebP, AVIF) to timed frames, cut like a video, in the sandbox process."""

import io
from collections.abc import Collection, Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

from PIL import Image

from embedder.media.colour import to_rgb
from embedder.media.images import check_pixels, finish_image, form_of, open_image, orientation_of, resize_image, upright
from embedder.media.loaded_image import LoadedImage
from embedder.media.media_errors import STILL_IMAGE, DecodeError
from embedder.media.resize import ResizeSpec, Size, SizedPixels, clip_size
from embedder.media.segments import PickedSegment, SegmentRule, TimedFrame, pick_segments

ANIMATED_FORMATS = frozenset({"GIF", "PNG", "WEBP", "AVIF"})  # several images in a TIFF or JPEG are no animation
MS = Fraction(1, 1000)
SHORTEST_MS, USUAL_MS = 10, 100
"""Frames with a declared duration of 10 ms or less are shown for 100 ms, as browsers do."""


def animation_segments(
    encoded: bytes, resize: ResizeSpec, rule: SegmentRule, max_pixels: int, medium_columns: Collection[str] = ()
) -> Iterator[PickedSegment[SizedPixels]]:
    """Decode an animated image one segment at a time; all frames have one size.

    The first image of each segment has the values of the file's `medium_columns`.

    Raises a DecodeError (a `StillImage` for a single frame), or whatever else Pillow raises for a broken file.
    """
    image = open_image(encoded, max_pixels)
    numbers = _numbers(image)
    if image.format not in ANIMATED_FORMATS or len(numbers) < 2:
        raise DecodeError(STILL_IMAGE, "the image has one frame")
    # In most files all frames are shown equally long; otherwise those of the last segment are spread unevenly.
    rule = replace(rule, duration_s=len(numbers) * next(_timed_frames(image, max_pixels)).shown_s)
    orientation = orientation_of(image)
    size: Size | None = None

    def convert(frame: Image.Image) -> SizedPixels:
        nonlocal size
        shown = upright(to_rgb(frame, resize.colour), orientation)
        if resize.mode == "patches":
            size = size or clip_size(shown.size, resize)
        return resize_image(shown, resize, size)

    medium: dict[str, Any] | None = None
    if medium_columns:
        from embedder.media.medium_values import picture_values

        medium = picture_values(form_of(image, orientation), image, io.BytesIO(encoded), medium_columns)
    for segment in pick_segments(_timed_frames(image, max_pixels), convert, rule):
        segment.images[0] = segment.images[0]._replace(medium=medium)
        yield segment


def animation_frame(encoded: bytes, resize: ResizeSpec, time_s: float, max_pixels: int) -> SizedPixels:
    """Decode the frame shown `time_s` seconds after the first; beyond either end, the first or last frame.

    Raises like `animation_segments`, except for `StillImage`.
    """
    image = open_image(encoded, max_pixels)
    orientation = orientation_of(image)
    shown: Image.Image | None = None
    for frame in _timed_frames(image, max_pixels):
        if shown is not None and frame.time_s > time_s:
            break
        shown = frame.frame
    if shown is None:
        raise DecodeError("NoFrames", "the image holds no frame")
    return finish_image(LoadedImage(shown, orientation), resize, max_pixels)


def _timed_frames(image: Image.Image, max_pixels: int) -> Iterator[TimedFrame[Image.Image]]:
    time_s = Fraction(0)
    for number in _numbers(image):
        try:
            image.seek(number)
        except Image.DecompressionBombError as error:
            raise DecodeError("TooManyPixels", f"{error} (`max_pixels`)") from None
        check_pixels(image.size, max_pixels)
        image.load()
        shown_s = _shown_ms(image) * MS
        frame = image.copy()  # the next frame is drawn over this one
        frame.format = image.format
        yield TimedFrame(time_s, shown_s, frame)
        time_s += shown_s


def _numbers(image: Image.Image) -> range:
    """Return the numbers of the frames; the first image of a PNG may be only for viewers without animation."""
    return range(int(getattr(image, "default_image", False)), getattr(image, "n_frames", 1))


def _shown_ms(image: Image.Image) -> Fraction:
    duration = image.info.get("duration")
    if isinstance(duration, int | float) and SHORTEST_MS < duration < float("inf"):
        return Fraction(duration)
    return Fraction(USUAL_MS)
