"""Camera raws made tag by tag: a DNG of one sensor plane, with or without a camera's preview before it."""

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORMS = {"B": (1, 1), "A": (2, 1), "H": (3, 2), "I": (4, 4), "R": (5, 8), "S": (10, 8)}
"""Letter -> type of a tag's values by its number, and their size in bytes; `R` and `S` are quotients of two numbers."""
XYZ_TO_SRGB = (32405, -15371, -4985, -9693, 18760, 416, 556, -2040, 10572)
"""Colours of a camera whose sensor sees in sRGB, each times 10,000."""
Tags = dict[int, tuple[str, Any]]

SUBFILE_TYPE, WIDTH, HEIGHT, BITS, COMPRESSION, PHOTOMETRIC, MAKE, MODEL = 254, 256, 257, 258, 259, 262, 271, 272
OFFSET, ORIENTATION, SAMPLES, ROWS, NUM_BYTES, SUB_IFDS = 273, 274, 277, 278, 279, 330
HERE = "here"
"""Value that becomes the place of the directory's data."""


def mosaic(pixels_HW3: NDArray[np.uint8]) -> NDArray[np.uint16]:
    """What a sensor under a Bayer filter (red, green / green, blue) sees of an image; uint16 (H, W)."""
    wide = pixels_HW3.astype(np.uint16) * 257
    seen = wide[:, :, 1].copy()
    seen[0::2, 0::2], seen[1::2, 1::2] = wide[0::2, 0::2, 0], wide[1::2, 1::2, 2]
    return seen


def dng(pixels_HW3: NDArray[np.uint8], *, orientation: int = 1, preview: bytes | None = None, **changed: Any) -> bytes:
    """A DNG of an image as a sensor saw it."""
    seen = mosaic(pixels_HW3)
    height, width = changed.get("height", seen.shape[0]), changed.get("width", seen.shape[1])
    data = seen.astype("<u2").tobytes()
    sensor: Tags = {
        SUBFILE_TYPE: ("I", [0]),
        WIDTH: ("I", [width]),
        HEIGHT: ("I", [height]),
        BITS: ("H", [16]),
        COMPRESSION: ("H", [1]),
        PHOTOMETRIC: ("H", [32803]),
        OFFSET: ("I", HERE),
        SAMPLES: ("H", [1]),
        ROWS: ("I", [height]),
        NUM_BYTES: ("I", [len(data)]),
        33421: ("H", [2, 2]),  # size of the filter's pattern, and its colours
        33422: ("B", bytes([0, 1, 1, 2])),
        50714: ("H", [0]),  # black and white
        50717: ("H", [65535]),
    }
    camera: Tags = {
        MAKE: ("A", b"Acme\0"),
        MODEL: ("A", b"One\0"),
        ORIENTATION: ("H", [orientation]),
        50706: ("B", bytes([1, 4, 0, 0])),  # version of DNG
        50708: ("A", b"Acme One\0"),
        50721: ("S", [(value, 10_000) for value in XYZ_TO_SRGB]),
        50728: ("R", [(1, 1)] * 3),
        50778: ("H", [21]),
    }
    if preview is None:
        return tiff_of([(sensor | camera, data)])
    shown: Tags = {
        SUBFILE_TYPE: ("I", [1]),
        WIDTH: ("I", [pixels_HW3.shape[1]]),
        HEIGHT: ("I", [pixels_HW3.shape[0]]),
        BITS: ("H", [8, 8, 8]),
        COMPRESSION: ("H", [7]),
        PHOTOMETRIC: ("H", [6]),
        OFFSET: ("I", HERE),
        SAMPLES: ("H", [3]),
        ROWS: ("I", [pixels_HW3.shape[0]]),
        NUM_BYTES: ("I", [len(preview)]),
    }
    return tiff_of([(shown | camera, preview), (sensor, data)])


def tiff_of(directories: list[tuple[Tags, bytes]], order: str = "<") -> bytes:
    """A TIFF of a directory with its data, and of those that are below it."""
    (first, data), *below = directories
    tail, places = b"", []
    if below:
        first = first | {SUB_IFDS: ("I", [0] * len(below))}
        start = 8 + len(_directory(first, data, 8, order))
        for tags, content in below:
            places.append(start + len(tail))
            tail += _directory(tags, content, places[-1], order)
        first = first | {SUB_IFDS: ("I", places)}
    mark = b"II*\0" if order == "<" else b"MM\0*"
    return mark + struct.pack(f"{order}I", 8) + _directory(first, data, 8, order) + tail


def _directory(tags: Tags, data: bytes, start: int, order: str) -> bytes:
    """Directory at a place, followed by the values that don't fit into it, and by its data."""
    body, entries = b"", []
    values_at = start + 2 + 12 * len(tags) + 4
    sizes = {tag: len(_packed(form, values, order)) for tag, (form, values) in tags.items()}
    data_at = values_at + sum(size + size % 2 for size in sizes.values() if size > 4)
    for tag, (form, values) in sorted(tags.items()):
        packed = _packed(form, [data_at] if values == HERE else values, order)
        number, size = FORMS[form]
        shown = packed.ljust(4, b"\0")
        if len(packed) > 4:
            shown = struct.pack(f"{order}I", values_at + len(body))
            body += packed + b"\0" * (len(packed) % 2)
        entries.append(struct.pack(f"{order}HHI", tag, number, len(packed) // size) + shown)
    content = struct.pack(f"{order}H", len(tags)) + b"".join(entries) + b"\0\0\0\0" + body + data
    return content + b"\0" * (len(content) % 2)


def _packed(form: str, values: Any, order: str) -> bytes:
    if isinstance(values, bytes):
        return values
    if values == HERE:
        return b"\0\0\0\0"
    if form in "RS":
        return b"".join(struct.pack(f"{order}{'II' if form == 'R' else 'ii'}", *each) for each in values)
    return struct.pack(f"{order}{len(values)}{form}", *values)
