"""Recognises the kind of an object by its first bytes; file names are not used."""

import codecs
import struct
from typing import Literal

from embedder.media.formats import HEIC, IMAGE_FORMATS, JPEG_XL
from embedder.media.raw_kinds import raw_kind

Kind = Literal["image", "video", "text"]

HEAD_BYTES = 4096  # enough for every signature known here
IMAGE_SIGNATURES = tuple(signature for each in IMAGE_FORMATS for signature in each.signatures)
BMP_HEADER_SIZES = frozenset({12, 16, 40, 52, 56, 64, 108, 124})
AVIF_BRANDS = frozenset({b"avif", b"avis"})
AVIF_SEQUENCE_BRAND = b"avis"
HEIF_BRANDS = frozenset(
    {b"mif1", b"mif2", b"msf1", b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"}
)
STILL_BRANDS = HEIF_BRANDS | {b"crx "}
"""Brands of the MP4 family for images that Pillow doesn't read: HEIC, camera raw."""
JPEG_SIGNATURE = b"\xff\xd8\xff"
MAX_JUNK_BYTES = 16  # before a JPEG: a script's line breaks, a byte order mark; covers in sound files come later
JXL_SIGNATURES = (b"\xff\x0a", b"\0\0\0\x0cJXL \r\n\x87\n")
OLD_MOV_BOXES = frozenset({b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot"})
EBML, EBML_DOCTYPES = b"\x1a\x45\xdf\xa3", (b"matroska", b"webm")
MPEG_PACK, MPEG_SEQUENCE = b"\0\0\x01\xba", b"\0\0\x01\xb3"
ASF = b"\x30\x26\xb2\x75\x8e\x66\xcf\x11"  # WMV, and WMA, which is sound
VIDEO_SIGNATURES = (MPEG_PACK, MPEG_SEQUENCE, ASF, b"FLV\x01")
UNREADABLE_SIGNATURES = (
    ("JP2", b"\0\0\0\x0cjP  \r\n\x87\n"),
    ("JP2", b"\xff\x4f\xff\x51"),
    ("PSD", b"8BPS"),
    ("EXR", b"v/1\x01"),
    ("ICO", b"\0\0\x01\0"),
    ("ICNS", b"icns"),
    ("EPS", b"%!PS-Adobe"),
    ("EPS", b"\xc5\xd0\xd3\xc6"),
    ("XCF", b"gimp xcf"),
    ("JXR", b"II\xbc\x01"),
    ("DDS", b"DDS \x7c"),
    ("HDR", b"#?RADIANCE"),
    ("RM", b".RMF"),
)
"""First bytes of image and clip kinds that are not decoded; the names are those of the usual suffixes."""
OTHER_SIGNATURES = (
    ("a ZIP archive, or a document packed as one", b"PK\3\4"),
    ("a ZIP archive without a file", b"PK\5\6"),
    ("a RAR archive", b"Rar!\x1a\x07"),
    ("a 7z archive", b"7z\xbc\xaf\x27\x1c"),
    ("a gzip file", b"\x1f\x8b"),
    ("a bzip2 file", b"BZh"),
    ("an xz file", b"\xfd7zXZ\0"),
    ("a Zstandard file", b"\x28\xb5\x2f\xfd"),
    ("an old Office document", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"),
    ("an SQLite database", b"SQLite format 3\0"),
    ("a Parquet file", b"PAR1"),
    ("an HDF5 file", b"\x89HDF\r\n\x1a\n"),
    ("a NumPy array", b"\x93NUMPY"),
    ("a program", b"\x7fELF"),
    ("a program", b"MZ"),
    ("sound (MP3)", b"ID3"),
    ("sound (FLAC)", b"fLaC"),
    ("sound (Ogg)", b"OggS"),
    ("sound (AMR)", b"#!AMR"),
    ("a font", b"wOFF"),
    ("a font", b"wOF2"),
    ("a property list", b"bplist00"),
)
"""First bytes of what is neither an image, a video nor a caption."""
UNKNOWN = "of a kind that isn't known here"
WEBP_ANIMATED = 2  # among the flags after VP8X
SHEET_MARK = "embedder contact sheet"
MARK_BYTES = 128  # with the first text of a PNG, or the EXIF data of JPEG and WebP
TS_SYNC, TS_BYTES, TS_PACKETS = 0x47, (188, 192), 5
TEXT_CONTROLS = frozenset("\t\n\r\f")


def sniff(head: bytes) -> Kind | None:
    """Recognise the kind of an object by its first bytes: 4096 are enough for every kind, 32 for most.

    Returns None for what can't be embedded (unknown, or empty).
    """
    if _is_text(head):  # first: no binary kind below is valid UTF-8 without control characters, "BM" begins words
        return "text"
    if _is_image(head):
        return "image"
    if _is_video(head):
        return "video"
    return None if jpeg_start(head) is None else "image"


def encoding_of(head: bytes) -> str:
    """Return the encoding that a text's byte order mark names; UTF-8 if it has none. `head` is its first bytes."""
    if head.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "utf-32"
    return "utf-16" if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"


def jpeg_start(head: bytes) -> int | None:
    """Return where a JPEG begins, after at most 16 stray bytes; None if none does. 4096 bytes are enough."""
    start = head.find(JPEG_SIGNATURE, 0, MAX_JUNK_BYTES + len(JPEG_SIGNATURE))
    return None if start < 0 or (start > 0 and (_is_image(head) or _is_video(head))) else start


def extra_kind(head: bytes) -> str | None:
    """Name the kind of an image that a package of the extra `formats` decodes; 4096 bytes nearly always suffice.

    Returns `HEIC`, `JXL`, or the kind of a camera raw from `raw_kind`; None for anything else.
    """
    if head.startswith(JXL_SIGNATURES):
        return JPEG_XL.name
    if head[4:8] == b"ftyp" and head[8:12] in HEIF_BRANDS:
        return None if AVIF_BRANDS & _ftyp_brands(head) else HEIC.name
    return raw_kind(head)


def may_be_animated(head: bytes) -> bool:
    """Return whether an image may have several timed frames, by its first 4096 bytes; of a GIF they don't say."""
    if head.startswith(b"\x89PNG"):
        return b"acTL" in head.partition(b"IDAT")[0]
    if head[:4] == b"RIFF":
        return head[8:16] == b"WEBPVP8X" and bool(head[20:21] and head[20] & WEBP_ANIMATED)
    return head.startswith(b"GIF8") or AVIF_SEQUENCE_BRAND in _ftyp_brands(head)


def unreadable_kind(head: bytes) -> str | None:
    """Name the kind of an image or clip that can't be decoded here: the usual suffix in capitals, else None.

    `head` is the start of an object that `sniff` recognises as neither image nor video; 4096 bytes are enough.
    """
    for kind, signature in UNREADABLE_SIGNATURES:
        if head.startswith(signature):
            return kind
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    return "SVG" if text.startswith((b"<svg", b"<?xml", b"<!--", b"<!doctype svg")) and b"<svg" in text else None


def other_kind(head: bytes) -> str:
    """Describe an object that is neither an image, a video nor a caption; 4096 bytes are enough."""
    if not head:
        return "an empty file"
    if not head.strip(b"\0"):
        return "nothing but zeros"
    if head[:4] == b"RIFF" and head[8:12] == b"WAVE":
        return "sound (WAV)"
    if head.startswith(b"%PDF-"):
        return "a PDF"
    if _is_text(head):  # before the signatures, of which some begin words
        start = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:16].lower()
        return "a web page" if start.startswith((b"<!doctype html", b"<html")) else "text"
    return next((kind for kind, signature in OTHER_SIGNATURES if head.startswith(signature)), UNKNOWN)


def is_own_sheet(head: bytes) -> bool:
    """Return whether these are the first bytes of a contact sheet that this program drew."""
    return SHEET_MARK.encode() in head[:MARK_BYTES] and _is_image(head)


def _is_transport_stream(head: bytes) -> bool:
    """Recognise packets of an MPEG transport stream, including camcorders' with four bytes before each."""
    return any(head[size - TS_BYTES[0] :: size][:TS_PACKETS] == bytes([TS_SYNC] * TS_PACKETS) for size in TS_BYTES)


def _is_text(head: bytes) -> bool:
    try:
        text = codecs.getincrementaldecoder(encoding_of(head))().decode(head)  # not final: it may cut a character
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
    if extra_kind(head) is not None:
        return True
    if head[:2] == b"BM":
        return int.from_bytes(head[14:18], "little") in BMP_HEADER_SIZES
    return bool(AVIF_BRANDS & _ftyp_brands(head))


def _is_video(head: bytes) -> bool:
    if brands := _ftyp_brands(head):
        return head[8:12] not in STILL_BRANDS and not AVIF_BRANDS & brands
    if head[:4] == EBML:
        return any(doctype in head[:256] for doctype in EBML_DOCTYPES)
    if head.startswith(VIDEO_SIGNATURES) or (head[:4] == b"RIFF" and head[8:12] == b"AVI "):
        return True
    return _is_old_mov(head) or _is_transport_stream(head)


def _is_old_mov(head: bytes) -> bool:
    """Return whether this is a QuickTime file older than `ftyp`: it begins with another box of a plausible size."""
    if len(head) < 8 or head[4:8] not in OLD_MOV_BOXES:
        return False
    (size,) = struct.unpack(">I", head[:4])
    return size in (0, 1) or size >= 8  # 0: to the end of the file; 1: the size follows in 64 bits


def _ftyp_brands(head: bytes) -> set[bytes]:
    if head[4:8] != b"ftyp" or len(head) < 12:
        return set()
    stop = min(len(head), int.from_bytes(head[:4], "big"), 1024)
    return {head[8:12]} | {head[start : start + 4] for start in range(16, stop - 3, 4)}
