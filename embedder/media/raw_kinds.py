"""Kinds of camera raws by content; most are TIFFs, and the tags of their first directory set them apart from images."""

import struct
from collections.abc import Mapping

SIGNATURES = (
    ("RAF", 0, b"FUJIFILMCCD-RAW"),
    ("ORF", 0, b"IIRO"),
    ("ORF", 0, b"IIRS"),
    ("ORF", 0, b"MMOR"),
    ("RW2", 0, b"IIU\0"),
    ("X3F", 0, b"FOVb"),
    ("MRW", 0, b"\0MRM"),
    ("CRW", 6, b"HEAPCCDR"),
    ("CR3", 4, b"ftypcrx "),
)
"""Kind, offset and bytes of those that are no TIFFs."""
MARKED_TIFFS = (("CR2", 8, b"CR\2\0"), ("IIQ", 8, b"IIII"), ("IIQ", 8, b"MMMM"))
TIFF_ORDERS: Mapping[bytes, str] = {b"II*\0": "<", b"MM\0*": ">"}
MAX_TAGS = 512

SUBFILE_TYPE, COMPRESSION, PHOTOMETRIC, MAKE, SUB_IFDS, DNG_VERSION, LEAF = 254, 259, 262, 271, 330, 50706, 34310
REDUCED_IMAGE = 1  # SubfileType: the directory holds a smaller copy of another one's image
MOSAICS = frozenset({32803, 34892})  # Photometric: one colour for each pixel, as sensors see; linear raw
COMPRESSIONS = frozenset({32767, 34713, 65535})  # Sony's, Nikon's, Pentax's; plain images have none of them
MAKERS = (
    ("NIKON", "NEF"),
    ("SONY", "ARW"),
    ("CANON", "CR2"),
    ("PENTAX", "PEF"),
    ("RICOH", "PEF"),
    ("SAMSUNG", "SRW"),
    ("HASSELBLAD", "3FR"),
    ("SEIKO EPSON", "ERF"),
    ("MAMIYA", "MEF"),
    ("LEAF", "MOS"),
    ("KODAK", "DCR"),
    ("EASTMAN KODAK", "DCR"),
    ("PHASE ONE", "IIQ"),
    ("LEICA", "RWL"),
)
"""Start of the tag Make, in capitals, and the usual kind of that maker's TIFF-based raws."""
OTHER_MAKER = "RAW"


def raw_kind(head: bytes) -> str | None:
    """Name the kind of a camera raw from its start; 4096 bytes are enough for nearly every camera.

    Returns the usual suffix in capitals, `RAW` for an unknown maker; None for anything else, including plain TIFFs.
    """
    for kind, place, signature in SIGNATURES:
        if head.startswith(signature, place):
            return kind
    order = TIFF_ORDERS.get(head[:4])
    return None if order is None else _tiff_kind(head, order)


def _tiff_kind(head: bytes, order: str) -> str | None:
    for kind, place, mark in MARKED_TIFFS:
        if head.startswith(mark, place):
            return kind
    tags = _first_directory(head, order)
    if DNG_VERSION in tags:
        return "DNG"
    if LEAF in tags:
        return "MOS"
    is_preview = tags.get(SUBFILE_TYPE) == REDUCED_IMAGE and SUB_IFDS in tags and MAKE in tags
    if is_preview or tags.get(PHOTOMETRIC) in MOSAICS or tags.get(COMPRESSION) in COMPRESSIONS:
        return _kind_of_maker(head, tags.get(MAKE))
    return None


def _first_directory(head: bytes, order: str) -> dict[int, int]:
    if len(head) < 8:
        return {}
    (start,) = struct.unpack_from(f"{order}I", head, 4)
    if start + 2 > len(head):
        return {}
    (num,) = struct.unpack_from(f"{order}H", head, start)
    tags: dict[int, int] = {}
    for place in range(start + 2, start + 2 + 12 * min(num, MAX_TAGS), 12):
        if place + 12 > len(head):
            break
        tag, form, count = struct.unpack_from(f"{order}HHI", head, place)
        is_short = form == 3 and count <= 2
        (tags[tag],) = struct.unpack_from(f"{order}{'H' if is_short else 'I'}", head, place + 8)
    return tags


def _kind_of_maker(head: bytes, place: int | None) -> str:
    maker = head[place : place + 32].upper().decode("latin-1") if place is not None else ""
    return next((kind for name, kind in MAKERS if maker.startswith(name)), OTHER_MAKER)
