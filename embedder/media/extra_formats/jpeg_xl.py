"""Decodes JPEG XL with libjxl; the size is read here first, because the library decodes whatever it is given."""

import io
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pillow_jxl
from PIL import Image

from embedder.media.images import WHOLE_FACTOR, check_pixels, form_of, load_image
from embedder.media.loaded_image import LoadedImage, PictureForm
from embedder.media.media_errors import DecodeError
from embedder.media.resize import ResizeSpec, Size

UPRIGHT = 1
CODESTREAM = b"\xff\x0a"
MAX_BOXES = 10_000  # of a container; a photograph has a handful
SIZE_BITS = (9, 13, 18, 30)  # of a side, by a selector of two bits
RATIOS = ((1, 1), (12, 10), (4, 3), (3, 2), (16, 9), (5, 4), (2, 1))  # width to height, by a selector from 1
MODES = {"F;16": "F"}  # the library widens half floats
BYTES_OF_PIXEL = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4, "I;16": 2, "F": 4}
JPEG_START = b"\xff\xd8"


def load(kind: str, encoded: bytes, resize: ResizeSpec, max_pixels: int) -> LoadedImage:
    """Decode an image; one that was converted losslessly from a JPEG is turned back into it and decoded as such.

    libjxl applies the header's orientation, so its EXIF orientation is ignored. Source: ISO/IEC 18181-2: the
    orientation of the codestream counts, not that of the Exif box. Raises a DecodeError if it is broken, too large, or
    of a pixel format without a conversion.
    """
    size = declared_size(encoded)
    if size is None:
        raise DecodeError("BrokenImage", f"{kind}: its header is cut off or broken")
    check_pixels(size, WHOLE_FACTOR * max_pixels)
    try:
        is_jpeg, info, data, profile, *boxes = pillow_jxl.Decoder(num_threads=0)(encoded)
    except (RuntimeError, ValueError, NotImplementedError):  # its text is for developers and gives no reason
        message = "libjxl can't decode it: it is cut off or broken, or takes more memory than `memory_bytes` allows"
        raise DecodeError("BrokenImage", f"{kind}: {message}") from None
    if is_jpeg:
        loaded = _load_jpeg(kind, data, resize, max_pixels)
        form = form_of(loaded.source, loaded.orientation)
        opened = _with_boxes(data, boxes[0] if boxes else ())
        return loaded._replace(opened=opened, form=form._replace(format="JXL"))
    mode = MODES.get(info.mode, info.mode)
    if len(data) != info.width * info.height * BYTES_OF_PIXEL.get(mode, 0):
        raise DecodeError("UnsupportedPixels", f"{kind}: {info.mode} of that depth isn't read; save it with 8 bits")
    image = Image.frombytes(mode, (info.width, info.height), data)
    image.info["icc_profile"] = profile
    opened = SimpleNamespace(info={"icc_profile": profile} | _metadata(boxes[0] if boxes else ()))
    return LoadedImage(image, UPRIGHT, opened=opened, form=PictureForm("JXL", image.size, image.mode))


def _metadata(boxes: Iterable[Any]) -> dict[str, bytes]:
    """Return the blocks in boxes of a container; that of Exif begins with an offset of four bytes (18181-2, 9.5)."""
    found: dict[str, bytes] = {}
    for box in boxes:
        if box.box_type == b"Exif":
            found.setdefault("exif", bytes(box.data)[4:])
        elif box.box_type == b"xml ":
            found.setdefault("xmp", bytes(box.data))
    return found


def open_metadata(encoded: bytes) -> Any:
    """Open what has an image's metadata: the container's boxes, and the JPEG that it keeps, if it keeps one.

    Boxes that are compressed by themselves are left out. Raises what the library raises if the JPEG can't be restored.
    """
    boxes = () if encoded.startswith(CODESTREAM) else list(_boxes(encoded))
    jpeg = pillow_jxl.Decoder(num_threads=0)(encoded)[2] if any(box.kind == b"jbrd" for box in boxes) else None
    return _with_boxes(
        jpeg, [SimpleNamespace(box_type=each.kind, data=encoded[each.start : each.end]) for each in boxes]
    )


def _with_boxes(jpeg: bytes | None, boxes: Iterable[Any]) -> Any:
    opened = SimpleNamespace(info={}) if jpeg is None else Image.open(io.BytesIO(jpeg), formats=("JPEG",))
    opened.info |= _metadata(boxes)
    return opened


def _load_jpeg(kind: str, data: bytes, resize: ResizeSpec, max_pixels: int) -> LoadedImage:
    if not data.startswith(JPEG_START):
        raise DecodeError("BrokenImage", f"{kind}: the JPEG that it keeps is no JPEG")
    return load_image(data, resize, max_pixels)


def declared_size(encoded: bytes) -> Size | None:
    """Read width and height from the codestream's header; None if the header is incomplete.

    Source: ISO/IEC 18181-1, SizeHeader; 18181-2, boxes `jxlc` and `jxlp`.
    """
    start = 0 if encoded.startswith(CODESTREAM) else _codestream_start(encoded)
    if start is None or encoded[start : start + 2] != CODESTREAM:
        return None
    header = encoded[start + 2 : start + 14]
    if len(header) < 2:
        return None
    bits = _Bits(int.from_bytes(header, "little"))
    is_small = bits.take(1) == 1
    height = _side(bits, is_small)
    ratio = bits.take(3)
    if ratio:
        num, denominator = RATIOS[ratio - 1]
        return height * num // denominator, height
    return _side(bits, is_small), height


class _Bits:
    """Bits of a number, the least significant first; zeros beyond its end."""

    def __init__(self, value: int) -> None:
        self._value = value

    def take(self, num_bits: int) -> int:
        value = self._value & ((1 << num_bits) - 1)
        self._value >>= num_bits
        return value


def _side(bits: _Bits, is_small: bool) -> int:
    if is_small:
        return (bits.take(5) + 1) * 8
    return bits.take(SIZE_BITS[bits.take(2)]) + 1


class _Box(NamedTuple):
    kind: bytes
    start: int
    end: int


def _codestream_start(encoded: bytes) -> int | None:
    """Return the start of the codestream in a container: in its only box, or in the first of several."""
    for box in _boxes(encoded):
        if box.kind in (b"jxlc", b"jxlp"):
            return box.start + (4 if box.kind == b"jxlp" else 0)  # a part starts with its number
    return None


def _boxes(encoded: bytes) -> Iterator[_Box]:
    place = 0
    for _ in range(MAX_BOXES):
        if (box := _box_at(encoded, place)) is None:
            return
        yield box
        place = box.end


def _box_at(encoded: bytes, place: int) -> _Box | None:
    header = encoded[place : place + 16]
    size, start = int.from_bytes(header[:4], "big"), place + 8
    if size == 1:
        size, start = int.from_bytes(header[8:16], "big"), place + 16
    if size == 0:
        size = len(encoded) - place
    if len(header) < 8 or size < start - place:
        return None
    return _Box(header[4:8], start, place + size)
