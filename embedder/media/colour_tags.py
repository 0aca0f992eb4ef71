"""Small, bounded parsers for colour information in a file's bytes that Pillow doesn't pass on.

None of them raises: a malformed file counts as saying nothing.
"""

import struct
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice, takewhile

from embedder.media.colour_profiles import Cicp, gamma_profile

MAX_PROFILE_BYTES = 4 << 20
"""Larger profiles are ignored. Those of printing presses have up to 3 MiB."""
MAX_BOXES = 1000
MAX_IPMA_BYTES = 1 << 20
MAX_CHUNKS = 1000
MAX_TAGS = 200

ADOBE_RGB_MARKS = (b"\0\1\0\2\0\0\0\4R03\0", b"\1\0\2\0\4\0\0\0R03\0")
"""Entry `InteroperabilityIndex` of an Exif in either byte order: Adobe RGB (Source: DCF 2.0, which cameras follow)."""


def says_adobe_rgb(exif: bytes) -> bool:
    """Return whether an Exif declares Adobe RGB."""
    return any(mark in exif for mark in ADOBE_RGB_MARKS)


def png_chunks(encoded: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield the name, start and end of each chunk of a PNG; the last one may end behind a file that was cut off."""
    place = 8
    while name := encoded[place + 4 : place + 8]:
        end = place + 12 + int.from_bytes(encoded[place : place + 4], "big")
        yield name, place, end
        place = end


def _chunks_before_pixels(encoded: bytes) -> Iterator[tuple[bytes, int, int]]:
    chunks = islice(png_chunks(encoded), MAX_CHUNKS)
    return takewhile(lambda chunk: chunk[0] not in (b"IDAT", b"IEND"), chunks)


def png_cicp(encoded: bytes) -> Cicp | None:
    """Return the codes in a PNG's `cICP` chunk (Source: PNG, third edition, 11.3.2.6)."""
    for name, start, end in _chunks_before_pixels(encoded):
        if name == b"cICP" and end - start == 16 and len(encoded) >= start + 12:
            return encoded[start + 8], encoded[start + 9]
    return None


def without_png_profile(encoded: bytes) -> bytes:
    """Return a PNG without its `iCCP` chunk, whose profile is too large for Pillow to open the file."""
    for name, start, end in _chunks_before_pixels(encoded):
        if name == b"iCCP":
            return encoded[:start] + encoded[end:]
    return encoded


BMP_HEADERS = (108, 124)  # versions 4 and 5
BMP_CALIBRATED, BMP_EMBEDDED = 0, int.from_bytes(b"MBED", "big")


def bmp_profile(encoded: bytes) -> bytes | None:
    """Return the profile of a BMP of version 4 or 5: embedded, or made of its endpoints and green's gamma."""
    head = encoded[14:138]
    if len(head) < 124 or int.from_bytes(head[:4], "little") not in BMP_HEADERS:
        return None
    kind = int.from_bytes(head[56:60], "little")
    if kind == BMP_EMBEDDED and head[0] == BMP_HEADERS[1]:
        start, size = struct.unpack("<II", head[112:120])
        return encoded[14 + start : 14 + start + size] if size <= MAX_PROFILE_BYTES else None
    if kind != BMP_CALIBRATED:
        return None
    ends = [value / (1 << 30) for value in struct.unpack("<9i", head[60:96])]
    sums = [sum(ends[first : first + 3]) for first in (0, 3, 6)]
    whole = [sum(ends[axis::3]) for axis in range(3)]
    if min(*sums, sum(whole)) <= 0:
        return None
    red, green, blue = ((ends[3 * each] / total, ends[3 * each + 1] / total) for each, total in enumerate(sums))
    white = (whole[0] / sum(whole), whole[1] / sum(whole))
    gamma = int.from_bytes(head[100:104], "little") / 65536
    return gamma_profile(gamma, (red, green, blue, white))


@lru_cache(maxsize=16)
def cicp_of_profile(profile: bytes) -> Cicp | None:
    """Return the codes in an ICC profile's `cicp` tag, which HDR pictures have (Source: ICC.1:2022, 9.2.17)."""
    for number in range(min(int.from_bytes(profile[128:132], "big"), MAX_TAGS)):
        entry = profile[132 + 12 * number : 144 + 12 * number]
        if entry[:4] == b"cicp":
            start = int.from_bytes(entry[4:8], "big") + 8
            return (profile[start], profile[start + 1]) if start + 4 <= len(profile) else None
    return None


def heif_cicp(encoded: bytes) -> Cicp | None:
    """Return the codes that a HEIF or AVIF file states for its primary image.

    Source: ISO/IEC 14496-12 (`meta`, `pitm`, `colr` of type `nclx`), 23008-12 (`iprp`, `ipco`, `ipma`).
    """
    meta = _find(encoded, b"meta", 0, len(encoded))
    if meta is None:
        return None
    start, end = meta[0] + 4, meta[1]
    primary, properties = _find(encoded, b"pitm", start, end), _find(encoded, b"iprp", start, end)
    if primary is None or properties is None:
        return None
    container = _find(encoded, b"ipco", *properties)
    if container is None:
        return None
    wide = encoded[primary[0]] if primary[0] < primary[1] else 0
    item = int.from_bytes(encoded[primary[0] + 4 : primary[0] + (8 if wide else 6)], "big")
    boxes = list(_boxes(encoded, *container))
    for kind, first, last in _boxes(encoded, *properties):
        for index in (
            _list_associated(encoded[first : min(last, first + MAX_IPMA_BYTES)], item) if kind == b"ipma" else ()
        ):
            if 0 < index <= len(boxes) and boxes[index - 1][0] == b"colr":
                colour = encoded[boxes[index - 1][1] : boxes[index - 1][2]]
                if colour[:4] == b"nclx" and len(colour) >= 8:
                    return int.from_bytes(colour[4:6], "big"), int.from_bytes(colour[6:8], "big")
    return None


def _boxes(encoded: bytes, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    for _ in range(MAX_BOXES):
        if start + 8 > end:
            return
        size, head = int.from_bytes(encoded[start : start + 4], "big"), 8
        if size == 1:
            size, head = int.from_bytes(encoded[start + 8 : start + 16], "big"), 16
        stop = end if size == 0 else start + size
        if stop < start + head or stop > end:
            return
        yield encoded[start + 4 : start + 8], start + head, stop
        start = stop


def _find(encoded: bytes, kind: bytes, start: int, end: int) -> tuple[int, int] | None:
    return next(((first, last) for found, first, last in _boxes(encoded, start, end) if found == kind), None)


def _list_associated(content: bytes, item: int) -> list[int]:
    """Return the property numbers of an item, from 1, found in the content of an `ipma` box."""
    if len(content) < 8:
        return []
    id_bytes, wide = (2 if content[0] < 1 else 4), content[3] & 1
    place = 8
    while place + id_bytes < len(content):
        found, num = int.from_bytes(content[place : place + id_bytes], "big"), content[place + id_bytes]
        place += id_bytes + 1
        size = num * (2 if wide else 1)
        if found == item:
            entries = content[place : place + size]
            if wide:
                return [high << 8 & 0x7F00 | low for high, low in zip(entries[::2], entries[1::2], strict=False)]
            return [value & 0x7F for value in entries]
        place += size
    return []
