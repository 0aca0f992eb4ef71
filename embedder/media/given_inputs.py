"""Texts and images passed in by a program; Pillow images and pixel arrays become files for the sandbox.

Pillow is imported only for its images and for arrays.
"""

import os
import re
import sys
from collections.abc import Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from embedder.errors import ArgumentTypeError, ConfigError

if TYPE_CHECKING:
    from PIL import Image

    GivenImage = str | Path | bytes | Image.Image | NDArray[np.uint8]

EXPECTED = "a path, the bytes of a file, an image of Pillow, or an array uint8 (H, W, 3)"
ARRAY_RULE = "an array of pixels is uint8 [0, 255] of shape (H, W, 3), (H, W, 4) with transparency, or (H, W) in grey"
CHANNELS = (1, 3, 4)
# Modes whose values a format stores unchanged; others are converted.
PNG_MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16", "I;16B"})
TIFF_MODES = frozenset({"I", "F", "CMYK", "LAB"})
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+:/", re.IGNORECASE)  # a path keeps one of its slashes
TRANSPARENT_MODES = {"La": "LA", "RGBa": "RGBA", "PA": "RGBA"}


def is_pillow_image(value: Any) -> "TypeGuard[Image.Image]":
    """Return whether this is a Pillow image; False if nobody has imported Pillow."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def is_array(value: Any) -> bool:
    """Return whether this is a NumPy array, or converts to one like a tensor."""
    return isinstance(value, np.ndarray) or (hasattr(value, "__array__") and not is_pillow_image(value))


def file_or_content(image: "GivenImage", name: str = "image") -> Path | bytes:
    """Return an image file's path or content; arrays and Pillow images are encoded, upright and lossless.

    Raises an ArgumentTypeError for what can hold no image, a ConfigError for one that can't be used.
    """
    if isinstance(image, str | os.PathLike):
        path = Path(image)
        if _ADDRESS.match(os.fspath(image)) and not path.exists():
            raise ConfigError(
                f"{name} {image}: found an address, which isn't fetched; give the path of a file, or bytes"
            )
        return path
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if is_pillow_image(image):
        return _encode(image, name)
    if is_array(image):
        from PIL import Image

        return _png(Image.fromarray(checked_pixels(np.asarray(image), name)))
    raise ArgumentTypeError(f"{name}: found {type(image).__name__}; give {EXPECTED}")


def text_list(texts: Sequence[str]) -> list[str]:
    """Return several texts as a list; a single text, a sequence of letters, is an ArgumentTypeError."""
    listed = None if isinstance(texts, str) or not isinstance(texts, Iterable) else list(texts)
    others = [each for each in listed or () if not isinstance(each, str)]
    if listed is None or others:
        found = f"a list with {type(others[0]).__name__}" if others else type(texts).__name__
        raise ArgumentTypeError(f'texts: found {found}; give a list of texts, as ["a red car"]')
    return listed


def image_list(images: "Sequence[GivenImage]") -> list[Path | bytes]:
    """Return paths or contents of several images; ArgumentTypeError for a single one, ConfigError for bad pixels."""
    is_one = isinstance(images, str | Path | bytes) or (is_array(images) and np.asarray(images).ndim != 4)
    if is_one or not isinstance(images, Iterable):
        raise ArgumentTypeError(f"images: found {type(images).__name__}; give a list, of which each is {EXPECTED}")
    return [file_or_content(image, f"images[{place}]") for place, image in enumerate(images)]


def checked_pixels(array: NDArray[Any], name: str) -> NDArray[np.uint8]:
    """Return an array's pixels as Pillow takes them; a ConfigError if it breaks the rule."""
    found = f"{name}: found {array.dtype} of shape {array.shape}; {ARRAY_RULE}"
    is_first = array.ndim == 3 and array.shape[0] in CHANNELS and array.shape[2] not in CHANNELS
    cures = [
        *(["array.transpose(1, 2, 0) brings the channels to the end"] if is_first else []),
        *(["(255 * array).round().astype('uint8') makes one of values in [0, 1]"] if array.dtype.kind == "f" else []),
    ]
    is_shape = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in CHANNELS)
    if array.dtype != np.uint8 or not is_shape or array.size == 0:
        raise ConfigError("; ".join([found, *cures]))
    return np.ascontiguousarray(array[:, :, 0] if array.shape[2:] == (1,) else array)


def _encode(image: "Image.Image", name: str) -> bytes:
    from embedder.media.images import orientation_of, upright

    try:
        image.load()
        image = upright(image, orientation_of(image))
        if image.mode not in PNG_MODES | TIFF_MODES:
            image = image.convert(TRANSPARENT_MODES.get(image.mode, "RGB"))
    except (OSError, SyntaxError, ValueError) as error:  # such as a truncated or closed file
        raise ConfigError(f"{name}: Pillow can't load its image: {error}; give one that can be shown") from None
    if image.width == 0 or image.height == 0:
        raise ConfigError(f"{name}: the image is {image.width} x {image.height} pixels; give one that has some")
    if image.mode in TIFF_MODES:
        file = BytesIO()
        image.save(file, "TIFF")
        return file.getvalue()
    return _png(image)


def _png(image: "Image.Image") -> bytes:
    """Encode a PNG with fast compression, since it is read only once."""
    file = BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()
