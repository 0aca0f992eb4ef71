"""Decodes images that strict readers refuse and viewers show: cut off near the end, or with a wrong checksum.

How much of a picture is really there is measured, not guessed from the file's size. What a decoder invents for missing
data depends on the bytes that follow. So the file is decoded with different continuations, or onto different
backgrounds, and pixels that differ are missing.
"""

import random
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from PIL import Image, ImageChops, ImageFile

from embedder.media.media_errors import TRUNCATED_IMAGE, DecodeError
from embedder.media.sniff import jpeg_start

MIN_SHARE = 0.95  # of the picture's rows; less is a reject
END_OF_IMAGE = b"\xff\xd9"
TAIL_BYTES = 4096  # several times the largest block of a JPEG
NUM_TAILS = 2  # random data may begin with "no change for 32,767 blocks"; hardly twice
BAND_ROWS = 16  # blocks of a JPEG or WebP are 8 or 16 rows high
MAX_MISSING_BYTES = 0.1  # of a WebP, as a share of what is there
NUM_COEFFICIENTS = 64
SEGMENT_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # not stuffing, not a restart, not padding
START_OF_SCAN, FRAME_STARTS = 0xDA, frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
NO_LENGTH = frozenset({0x01, 0xD8, 0xD9})
ON_GROUNDS = frozenset({"PNG", "BMP", "TIFF"})
"""Formats whose decoders leave pixels without data as they were."""

Load = Callable[[bytes], Image.Image]
"""Opens a file by its content, checks its size and decodes it."""


class Salvaged(NamedTuple):
    """Decoded image, and a note on what is missing; None means nothing."""

    image: Image.Image
    note: str | None


class _Scan(NamedTuple):
    """Scan of a JPEG: its components, its coefficients, and whether it refines bits of an earlier scan."""

    components: frozenset[int]
    coefficients: range
    is_refinement: bool
    data_start: int


def salvage(encoded: bytes, load: Load, prepare: Load) -> Salvaged | None:
    """Decode an image that its strict reader has refused, if at least `MIN_SHARE` of its rows are there.

    A truncated progressive JPEG has all rows once every coefficient has been sent; only low bits are then missing, and
    it is embedded however many. Returns None for an unknown format or kind of damage; raises a `TruncatedImage` if too
    much is missing, and whatever else Pillow raises.
    """
    if jpeg_start(encoded) == 0:
        return _salvage_jpeg(encoded, load)
    if encoded[:4] == b"RIFF" and encoded[8:12] == b"WEBP":
        return _salvage_webp(encoded, load)
    return _salvage_on_grounds(encoded, prepare)


def _salvage_jpeg(encoded: bytes, load: Load) -> Salvaged | None:
    components, scans = _scans(encoded)
    if not scans or END_OF_IMAGE in encoded[scans[-1].data_start :]:
        return None  # it was refused for another reason than a missing end
    sent = {(each, number) for scan in scans if not scan.is_refinement for each in scan.components
            for number in scan.coefficients}  # fmt: skip
    if len(sent) < len(components) * NUM_COEFFICIENTS:
        raise _truncated_error("the file was cut off before the last of its scans that show a rough picture had begun")
    cut = encoded.rstrip(b"\xff")
    restart = _next_restart(encoded[scans[-1].data_start :])
    image = load(cut + END_OF_IMAGE)
    others = (load(cut + _noise(seed) + restart + _noise(seed + 1) + END_OF_IMAGE) for seed in range(NUM_TAILS))
    share = _known_share(image, others)
    if share < 1 and scans[-1].is_refinement:
        return Salvaged(image, "the file was cut off in a scan that refines the picture")
    return Salvaged(image, _note(share))


def _scans(encoded: bytes) -> tuple[frozenset[int], list[_Scan]]:
    components: frozenset[int] = frozenset()
    scans: list[_Scan] = []
    offset = 0
    while found := SEGMENT_MARKER.search(encoded, offset):
        marker, offset = encoded[found.end() - 1], found.end()
        if marker in NO_LENGTH:
            continue
        body = encoded[offset + 2 : offset + int.from_bytes(encoded[offset : offset + 2], "big")]
        offset += 2 + len(body)
        if marker in FRAME_STARTS:
            components = frozenset(body[6::3])
        elif marker == START_OF_SCAN and body and len(body) == 4 + 2 * body[0]:
            first, last, bits = body[-3:]
            scans.append(_Scan(frozenset(body[1:-3:2]), range(first, last + 1), bits >> 4 > 0, offset))
    return components, scans


def _next_restart(data: bytes) -> bytes:
    """Return the marker that follows a scan's last restart marker; the first one if it has none."""
    places = [data.rfind(bytes((0xFF, 0xD0 + number))) for number in range(8)]
    return bytes((0xFF, 0xD0 + (places.index(max(places)) + 1) % 8 if max(places) >= 0 else 0xD0))


def _salvage_webp(encoded: bytes, load: Load) -> Salvaged | None:
    missing = int.from_bytes(encoded[4:8], "little") + 8 - len(encoded)
    if not 0 < missing <= MAX_MISSING_BYTES * len(encoded):
        return None
    image = load(encoded + bytes(missing))
    share = _known_share(image, (load(encoded + _noise(seed, missing)) for seed in range(NUM_TAILS)))
    return Salvaged(image, _note(share))


def _salvage_on_grounds(encoded: bytes, prepare: Load) -> Salvaged | None:
    """Decode onto two backgrounds: a pixel that shows them is missing."""
    with _tolerant_reading():
        image, other = (_on_ground(prepare(encoded), value) for value in (0, 1))
    if image is None or other is None:
        return None
    box = _difference(image, other).getbbox()
    return Salvaged(image, _note(1 - (box[3] - box[1]) / image.height if box else 1))


@contextmanager
def _tolerant_reading() -> Iterator[None]:
    """Let Pillow ignore invalid checksums and texts of a PNG, and stop where the data end."""
    ImageFile.LOAD_TRUNCATED_IMAGES = True
    try:
        yield
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = False


def _on_ground(image: Image.Image, value: int) -> Image.Image | None:
    if image.format not in ON_GROUNDS:
        return None
    num_bands = len(image.getbands())
    image.im = Image.new(image.mode, image.size, value if num_bands == 1 else (value,) * num_bands).im
    image.load()
    return image


def _known_share(image: Image.Image, others: Iterable[Image.Image]) -> float:
    """Return the share of a picture, sent in rows of blocks, before the first pixel that differs in another."""
    shares = [1.0]
    for other in others:
        difference = _difference(image, other)
        if box := difference.getbbox():
            band = difference.crop((0, box[1], difference.width, min(box[1] + BAND_ROWS, difference.height)))
            column = (band.getbbox() or box)[0]
            shares.append((box[1] + band.height * column / difference.width) / difference.height)
    return min(shares)


def _difference(image: Image.Image, other: Image.Image) -> Image.Image:
    a, b = (Image.frombytes("L", (len(data) // image.height, image.height), data)
            for data in (image.tobytes(), other.tobytes()))  # fmt: skip
    return ImageChops.difference(a, b)


def _note(share: float) -> str | None:
    if share >= 1:
        return None
    there = f"the file was cut off or is damaged: {share:.1%} of the picture is there"
    if share < MIN_SHARE:
        raise _truncated_error(f"{there}; {MIN_SHARE:.0%} must be")
    return there


def _truncated_error(message: str) -> DecodeError:
    return DecodeError(TRUNCATED_IMAGE, message)


def _noise(seed: int, num_bytes: int = TAIL_BYTES) -> bytes:
    """Return random data without markers, always the same for a seed."""
    return random.Random(seed).randbytes(num_bytes).replace(b"\xff", b"\x7f")
