"""Images of the extra `formats` made to be as bad as the formats allow: lies about size, bombs, boxes without end."""

import struct
from collections.abc import Callable, Iterator

import numpy as np
from PIL import Image

from corpus import encode
from hostile.camera_raws import dng

JXL_CONTAINER = b"\0\0\0\x0cJXL \r\n\x87\n\0\0\0\x14ftypjxl \0\0\0\0jxl "
HUGE_JXL = 2**30


def extra_contents(good: dict[str, bytes]) -> Iterator[tuple[str, Callable[[], bytes] | bytes]]:
    heic, jxl, raw = good["plain.heic"], good["lossy.jxl"], good["plain.dng"]
    square = np.zeros((64, 64, 3), np.uint8)
    yield "60,000 x 60,000.heic", heic_size(heic, 60_000, 60_000)
    yield "14,000 x 14,000 of a few pixels.heic", heic_size(heic, 14_000, 14_000)
    yield "65,535 tiles a side.heic", grid_size(good["tiles.heic"])
    yield "4 billion items.heic", heic.replace(b"iloc\0", b"iloc\xff", 1)
    yield "a million boxes.heic", heic[:28] + box(b"free", b"") * 1_000_000
    yield "boxes in boxes.heic", heic[:28] + boxes_in_boxes(5_000)
    yield "nothing but its brand.heic", box(b"ftyp", b"heic\0\0\0\0mif1heic")
    yield "a clip that says it is an image.heic", good["clip.mp4"].replace(b"ftypisom", b"ftypheic", 1)
    yield "a billion pixels a side.jxl", jxl_size(HUGE_JXL, HUGE_JXL)
    yield "a billion pixels a side, in a box.jxl", JXL_CONTAINER + box(b"jxlc", jxl_size(HUGE_JXL, HUGE_JXL))
    yield "14,000 x 14,000 without pixels.jxl", jxl_size(14_000, 14_000)
    yield (
        "bomb just below the pixel limit.jxl",
        lambda: encode(Image.new("L", (9990, 9990)), "JXL", lossless=True, effort=1),
    )
    yield "a million boxes.jxl", JXL_CONTAINER + box(b"free", b"") * 1_000_000
    yield "box of no length.jxl", JXL_CONTAINER + struct.pack(">I4s", 0, b"jxlp") + jxl
    yield (
        "parts in the wrong order.jxl",
        JXL_CONTAINER
        + b"".join(
            box(b"jxlp", struct.pack(">I", number) + jxl[start : start + 40])
            for number, start in ((3, 40), (0, 0), (0x80000001, 80))
        ),
    )
    yield "no more than a mark.jxl", b"\xff\x0a"
    yield "60,000 x 60,000.dng", dng(square, width=60_000, height=60_000)
    yield "14,000 x 14,000 of a few pixels.dng", dng(square, width=14_000, height=14_000)
    yield "0 x 0.dng", dng(square, width=0, height=0)
    yield "preview of 65,500 x 65,500.dng", dng(square, preview=jpeg_of(good["plain.jpg"], 65_500))
    yield "preview of noise.dng", dng(square, preview=b"\xff\xd8\xff" + b"\xa5" * 5000)
    yield "directory that is its own sub-directory.dng", own_directory(good["preview.dng"])
    yield "cut to its tags.dng", raw[:700]
    yield "sensor of a camera that nobody made.nef", dng(square).replace(struct.pack("<H", 50706), b"\x99\x99", 1)
    yield "noise.cr3", box(b"ftyp", b"crx \0\0\0\x01crx isom") + b"\xa5" * 50_000
    yield "noise.raf", b"FUJIFILMCCD-RAW 0201" + b"\xa5" * 50_000
    yield "noise.orf", b"IIRO\x08\0\0\0" + b"\xff" * 50_000
    yield "noise.rw2", b"IIU\0\x18\0\0\0" + b"\xff" * 50_000
    yield "noise.x3f", b"FOVb" + b"\xff" * 50_000


def box(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I4s", 8 + len(content), kind) + content


def boxes_in_boxes(depth: int) -> bytes:
    return b"".join(struct.pack(">I4sI", 12 * (depth - level), b"meta", 0) for level in range(depth))


def heic_size(heic: bytes, width: int, height: int) -> bytes:
    """Every image of the file says that it has this size."""
    parts = heic.split(b"ispe\0\0\0\0")
    size = struct.pack(">II", width, height)
    return parts[0] + b"".join(b"ispe\0\0\0\0" + size + part[8:] for part in parts[1:])


def grid_size(heic: bytes) -> bytes:
    """A grid of 256 x 256 tiles, of which it has four, and 65,535 x 65,535 pixels."""
    place = heic.index(b"idat") + 4
    return heic[:place] + struct.pack(">BBBBHH", 0, 0, 255, 255, 65_535, 65_535) + heic[place + 8 :]


def jxl_size(width: int, height: int) -> bytes:
    """The header of a codestream with this size, and zeros behind it."""
    value, place = 0, 1  # the first bit: not small
    for edge, has_ratio in ((height, True), (width, False)):
        value |= 3 << place | (edge - 1) << (place + 2)
        place += 32 + (3 if has_ratio else 0)
    return b"\xff\x0a" + value.to_bytes(12, "little") + b"\0" * 200


def jpeg_of(jpeg: bytes, side: int) -> bytes:
    place = jpeg.index(b"\xff\xc0") + 5
    return jpeg[:place] + struct.pack(">HH", side, side) + jpeg[place + 4 :]


def own_directory(raw: bytes) -> bytes:
    """The tag SubIFDs points to the directory that it stands in."""
    place = raw.index(struct.pack("<HHI", 330, 4, 1)) + 8
    return raw[:place] + struct.pack("<I", 8) + raw[place + 4 :]
