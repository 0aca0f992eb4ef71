"""Pixels in the form the vision tower takes them: squares unchanged, others as patches with their grid."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from embedder.media.resize import ResizeSpec


def pixel_columns(pixels_FHWC: NDArray[np.uint8], resize: ResizeSpec) -> dict[str, NDArray[Any]]:
    """Make `pixels`, frames or patches (N, 3 values a pixel), and with own proportions `image_grid`.

    The grid is int32 (3,): frames, patch rows and patch columns. Patches of squares that become one token follow each
    other, square by square.
    """
    if resize.mode != "patches":
        return {"pixels": pixels_FHWC}
    side, (frames, height, width, _) = resize.patch_size, pixels_FHWC.shape
    rows, columns = height // side, width // side
    merge = resize.merge_size
    squares = pixels_FHWC.reshape(frames, rows // merge, merge, side, columns // merge, merge, side, 3)
    patches = squares.transpose(0, 1, 4, 2, 5, 3, 6, 7)
    return {
        "pixels": patches.reshape(frames * rows * columns, 3 * side**2),
        "image_grid": np.array([frames, rows, columns], np.int32),
    }
