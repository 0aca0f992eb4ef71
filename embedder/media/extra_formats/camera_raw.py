"""Decodes camera raws with LibRaw: the camera's own preview if it is large enough, else the developed sensor.

A preview is what the photographer saw, with the camera's colours, and costs as little as a JPEG. Without one, the raw
is developed with the camera's white balance; at half size, one pixel for each 2 x 2 of the sensor, if the model needs
no more.
"""

import io

import rawpy
from PIL import Image

from embedder.media.images import WHOLE_FACTOR, check_pixels, load_image, open_image, orientation_of
from embedder.media.loaded_image import LoadedImage, PictureForm
from embedder.media.media_errors import UNSUPPORTED_CAMERA, DecodeError
from embedder.media.resize import ResizeSpec, Size, scaled_size

ORIENTATIONS = {0: 1, 3: 3, 5: 8, 6: 6}
"""Maps LibRaw's flip to the equivalent EXIF orientation."""
UPRIGHT = 1
MAX_PROPORTIONS_OFF = 0.1
"""A preview whose proportions differ more is letterboxed, cropped, or has a wrong orientation."""


def load(kind: str, encoded: bytes, resize: ResizeSpec, max_pixels: int) -> LoadedImage:
    """Decode a camera raw; `kind` is only for messages.

    `max_pixels` limits the preview or the developed image; the sensor may have twice as many if half size is enough.

    Raises:
        DecodeError: it is broken, or too large; of type `UnsupportedCamera`: LibRaw doesn't recognise it.
    """
    with rawpy.RawPy() as raw:
        try:
            raw.open_buffer(io.BytesIO(encoded))
            wanted = scaled_size(_upright_size(raw), resize)
            loaded = _preview(raw, wanted, resize, max_pixels) or _develop(raw, wanted, max_pixels)
            return loaded._replace(form=PictureForm("RAW", _upright_size(raw)))
        except (rawpy.LibRawUnsufficientMemoryError, rawpy.LibRawMemPoolOverflowError):
            raise MemoryError from None
        except rawpy.LibRawFileUnsupportedError:
            raise DecodeError(
                UNSUPPORTED_CAMERA,
                f"{kind}: LibRaw finds no camera that it knows; if the file is whole, convert it to DNG or JPEG",
            ) from None
        except rawpy.LibRawError as error:
            raise DecodeError(type(error).__name__, f"{kind}: LibRaw can't decode it: {_text(error)}") from None


def _upright_size(raw: rawpy.RawPy) -> Size:
    width, height = max(1, raw.sizes.width), max(1, raw.sizes.height)
    return (height, width) if raw.sizes.flip in (5, 6) else (width, height)


def _preview(raw: rawpy.RawPy, wanted: Size, resize: ResizeSpec, max_pixels: int) -> LoadedImage | None:
    """Return the embedded JPEG unless it is too small, has other proportions than the image, or is broken."""
    try:
        thumbnail = raw.extract_thumb()
    except (rawpy.LibRawNonFatalError, rawpy.LibRawIOError, rawpy.LibRawDataError, rawpy.NotSupportedError):
        return None
    if thumbnail.format != rawpy.ThumbFormat.JPEG:
        return None
    try:
        opened = open_image(thumbnail.data, max_pixels)
        orientation = orientation_of(opened)
        if orientation == UPRIGHT:
            orientation = ORIENTATIONS.get(raw.sizes.flip, UPRIGHT)
        size = opened.size if orientation < 5 else opened.size[::-1]
        if not (_alike(size, _upright_size(raw)) and all(map(int.__ge__, size, wanted))):
            return None
        return load_image(thumbnail.data, resize, max_pixels)._replace(orientation=orientation)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - a broken JPEG raises anything, and the sensor's data may be whole
        return None


def _alike(size: Size, other: Size) -> bool:
    (width, height), (other_width, other_height) = size, other
    return abs(width * other_height / (height * other_width) - 1) <= MAX_PROPORTIONS_OFF


def _develop(raw: rawpy.RawPy, wanted: Size, max_pixels: int) -> LoadedImage:
    sizes = raw.sizes
    is_half = all(have // 2 >= want for have, want in zip(_upright_size(raw), wanted, strict=True))
    check_pixels((sizes.raw_width, sizes.raw_height), max_pixels * (WHOLE_FACTOR if is_half else 1))
    raw.unpack()
    pixels = raw.postprocess(half_size=is_half, use_camera_wb=True, output_bps=8)
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    return LoadedImage(Image.fromarray(pixels), UPRIGHT)


def _text(error: Exception) -> str:
    first = error.args[0] if error.args else ""
    return first.decode(errors="replace") if isinstance(first, bytes) else str(first)
