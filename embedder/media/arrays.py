"""Images as arrays, uint8 (H, W, 3) RGB or (H, W, 1) grey: conversion from and to Pillow's, and orientation.

Imported with the first image that needs it, because importing NumPy takes 0.1 s.
"""

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Pixels = NDArray[np.uint8]

TURNED = {5, 6, 7, 8}
"""EXIF orientations that swap rows and columns."""


def to_array(image: Image.Image) -> Pixels:
    """Copy the pixels of an RGB or L image."""
    return np.atleast_3d(np.asarray(image))


def to_pillow(pixels_HWC: Pixels) -> Image.Image:
    """Copy contiguous pixels into an RGB or L image; takes half the time of `Image.fromarray`."""
    height, width, num_channels = pixels_HWC.shape
    mode = "RGB" if num_channels == 3 else "L"
    return Image.frombuffer(mode, (width, height), pixels_HWC, "raw", mode, 0, 1)


def upright_array(pixels_HWC: Pixels, orientation: int) -> Pixels:
    """Apply an EXIF orientation (EXIF 2.32, tag 0x0112); unknown values change nothing.

    Whole pixels are moved, which takes a third of Pillow's time.
    """
    if not 2 <= orientation <= 8:
        return pixels_HWC
    num_channels = pixels_HWC.shape[2]
    whole = pixels_HWC.view(np.dtype((np.void, num_channels)))[..., 0]
    if orientation in TURNED:
        whole = whole.T
    if orientation in (3, 4, 7, 8):
        whole = whole[::-1]
    if orientation in (2, 3, 6, 7):
        whole = whole[:, ::-1]
    return np.ascontiguousarray(whole).view(np.uint8).reshape(*whole.shape, num_channels)
