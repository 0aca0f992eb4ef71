"""Kind of an object by its first bytes; file names are not used."""

import codecs
import struct
from typing import Literal

from embedder.media.formats import IMAGE_FORMATS

Kind = Literal["image", "video", "text"]

IMAGE_SIGNATURES = tuple(signature for each in IMAGE_FORMATS for signature in each.signatures)
BMP_HEADER_SIZES = frozenset({12, 16, 40, 52, 56, 64, 108, 124})
AVIF_BRANDS = frozenset({b"avif", b"avis"})
STILL_BRANDS = frozenset({b"mif1", b"msf1", b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"crx "})
"""Brands of the MP4 family whose files hold images that Pillow doesn't read: HEIC, camera raw."""
OLD_MOV_BOXES = frozenset({b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot"})
EBML, EBML_DOCTYPES = b"\x1a\x45\xdf\xa3", (b"matroska", b"webm")
UNREADABLE_SIGNATURES = (
    ("JXL", b"\xff\x0a"),
    ("JXL", b"\0\0\0\x0cJXL \r\n\x87\n"),
    ("JP2", b"\0\0\0\x0cjP  \r\n\x87\n"),
    ("JP2", b"\xff\x4f\xff\x51"),
    ("PSD", b"8BPS"),
    ("RAF", b"FUJIFILMCCD-RAW"),
    ("ORF", b"IIRO"),
    ("ORF", b"IIRS"),
    ("ORF", b"MMOR"),
    ("RW2", b"IIU\0"),
    ("X3F", b"FOVb"),
    ("EXR", b"v/1\x01"),
    ("ICO", b"\0\0\x01\0"),
    ("ICNS", b"icns"),
    ("EPS", b"%!PS-Adobe"),
    ("XCF", b"gimp xcf"),
    ("MPG", b"\0\0\x01\xba"),
    ("MPG", b"\0\0\x01\xb3"),
    ("WMV", b"\x30\x26\xb2\x75\x8e\x66\xcf\x11"),
    ("FLV", b"FLV\x01"),
    ("RM", b".RMF"),
)
"""Images and clips of kinds that are not decoded, by their first bytes; the names are those of the usual suffixes."""
SHEET_MARK = "embedder contact sheet"
MARK_BYTES = 128  # of a PNG, in which its first text stands
TS_SYNC, TS_PACKETS = 0x47, (188, 192)
TEXT_CONTROLS = frozenset("\t\n\r\f")


def sniff(head: bytes) -> Kind | None:
    """Recognise the kind of an object by its first bytes.

    Args:
        head: the beginning of the object; 4096 bytes are enough for every kind, 32 for most.

    Returns:
        The kind, or None for what can't be embedded (unknown, or empty).
    """
    if _is_text(head):  # first: no binary kind below is valid UTF-8 without control characters, "BM" begins words
        return "text"
    if _is_image(head):
        return "image"
    if _is_video(head):
        return "video"
    return None


def unreadable_kind(head: bytes) -> str | None:
    """Name the kind of an image or clip that can't be decoded here, from its first bytes.

    Args:
        head: the beginning of an object that `sniff` recognises as neither image nor video; 4096 bytes are enough.

    Returns:
        The usual suffix in capitals, or None for anything else.
    """
    if head[4:8] == b"ftyp":
        if head[8:12] == b"crx ":
            return "CR3"
        return "HEIC" if head[8:12] in STILL_BRANDS else None
    for kind, signature in UNREADABLE_SIGNATURES:
        if head.startswith(signature):
            return kind
    if _is_transport_stream(head):
        return "MTS"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    return "SVG" if text.startswith((b"<svg", b"<?xml", b"<!--", b"<!doctype svg")) and b"<svg" in text else None


def is_own_sheet(head: bytes) -> bool:
    """Whether these are the first bytes of a contact sheet that this program drew."""
    return head.startswith(b"\x89PNG") and SHEET_MARK.encode() in head[:MARK_BYTES]


def _is_transport_stream(head: bytes) -> bool:
    """Packets of an MPEG transport stream, those of camcorders with four bytes before each."""
    starts = ((size - 188) + number * size for size in TS_PACKETS for number in range(4))
    marks = [len(head) > start and head[start] == TS_SYNC for start in starts]
    return all(marks[:4]) or all(marks[4:])


def _is_text(head: bytes) -> bool:
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)  # not final: the head may cut a character
    except UnicodeDecodeError:
        return False
    text = text.removeprefix("\ufeff")
    if text.isprintable():
        return bool(text)
    return not any(_is_control(character) for character in text if not character.isprintable())


def _is_control(character: str) -> bool:
    code = ord(character)
    return (code < 0x20 and character not in TEXT_CONTROLS) or 0x7F <= code < 0xA0


def _is_image(head: bytes) -> bool:
    if head.startswith(IMAGE_SIGNATURES) or (head[:4] == b"RIFF" and head[8:12] == b"WEBP"):
        return True
    if head[:2] == b"BM":
        return int.from_bytes(head[14:18], "little") in BMP_HEADER_SIZES
    return bool(AVIF_BRANDS & _ftyp_brands(head))


def _is_video(head: bytes) -> bool:
    if brands := _ftyp_brands(head):
        return head[8:12] not in STILL_BRANDS and not AVIF_BRANDS & brands
    if head[:4] == EBML:
        return any(doctype in head[:256] for doctype in EBML_DOCTYPES)
    return (head[:4] == b"RIFF" and head[8:12] == b"AVI ") or _is_old_mov(head)


def _is_old_mov(head: bytes) -> bool:
    """Whether this is a QuickTime file from before `ftyp`: it begins with another box, of a plausible size."""
    if len(head) < 8 or head[4:8] not in OLD_MOV_BOXES:
        return False
    (size,) = struct.unpack(">I", head[:4])
    return size in (0, 1) or size >= 8  # 0: to the end of the file; 1: the size follows in 64 bits


def _ftyp_brands(head: bytes) -> set[bytes]:
    """Major and compatible brands of a file of the MP4 family; empty for any other file."""
    if head[4:8] != b"ftyp" or len(head) < 12:
        return set()
    stop = min(len(head), int.from_bytes(head[:4], "big"), 1024)
    return {head[8:12]} | {head[start : start + 4] for start in range(16, stop - 3, 4)}
