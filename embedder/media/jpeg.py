"""Decodes JPEGs with libjpeg-turbo straight into an array: the same bits as Pillow's, without its copies."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

COLOURS = {"RGB": "RGB", "L": "GRAY"}
"""Maps Pillow's mode to the colours to ask for; CMYK and its inversions are left to Pillow."""


def decode_pixels(encoded: bytes, mode: str) -> "NDArray[np.uint8] | None":
    """Decode a JPEG at full size; uint8 [0, 255], (H, W, 3) RGB or (H, W, 1) grey.

    Returns None if Pillow has to decide: other colours than RGB and grey, damaged data, or no simplejpeg.
    """
    colours = COLOURS.get(mode)
    if colours is None:
        return None
    try:
        from simplejpeg import decode_jpeg
    except ImportError:
        return None
    try:  # strict: refuse what libjpeg-turbo would guess
        pixels_HWC: NDArray[np.uint8] = decode_jpeg(encoded, colours, fastdct=False, fastupsample=False, strict=True)
    except ValueError:
        return None
    return pixels_HWC
