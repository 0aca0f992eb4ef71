"""Reads the size of a video file from its outermost headers.

Readers of Matroska, AVI, FLV and ASF end without an error where a file was cut off; only the declared size reveals such
a clip. MPEG streams declare none: they count as complete.
"""

import struct
from typing import BinaryIO

EBML_HEADER, EBML_SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"
MP4_BOXES = frozenset(
    {b"ftyp", b"moov", b"mdat", b"moof", b"mfra", b"free", b"skip", b"wide", b"sidx", b"styp", b"uuid"}
)
MAX_MP4_BOXES = 100_000  # a fragmented file has two per fragment
MAX_RIFF_BYTES = 0x7FFF_0000  # sizes above it are placeholders of recorders that never finished the file
HEAD_BYTES = 4096
ASF_HEADER = b"\x30\x26\xb2\x75\x8e\x66\xcf\x11"
ASF_FILE_PROPERTIES = b"\xa1\xdc\xab\x8c\x47\xa9\xcf\x11\x8e\xe4\x00\xc0\x0c\x20\x53\x65"
MAX_FLV_BYTES = 2.0**50
FLV_FILE_SIZE = b"\x00\x08filesize\x00"  # a key of the first tag, the marker of a double after it


def declared_bytes(file: BinaryIO) -> int | None:
    """Return the size declared in the file's headers, or None; the position in `file` is lost.

    A file is cut off if this is more than it holds. Bytes after the declared end are common and harmless.
    """
    file.seek(0)
    head = file.read(HEAD_BYTES)
    if head[:4] == EBML_HEADER:
        return _matroska_bytes(head)
    if head[:4] == b"RIFF":
        size = int.from_bytes(head[4:8], "little")
        return size + 8 if size < MAX_RIFF_BYTES else None
    if head[4:8] in MP4_BOXES:
        return _mp4_bytes(file)
    if head.startswith(ASF_HEADER):
        return _asf_bytes(head)
    return _flv_bytes(head) if head.startswith(b"FLV") else None


def _asf_bytes(head: bytes) -> int | None:
    """Read the size in the file properties, 24 bytes after their identifier; it is 0 in a live recording."""
    found = head.find(ASF_FILE_PROPERTIES)
    size = head[found + 40 : found + 48]
    return int.from_bytes(size, "little") or None if found >= 0 and len(size) == 8 else None


def _flv_bytes(head: bytes) -> int | None:
    """Read the file size in the metadata, which most writers fill in."""
    found = head.find(FLV_FILE_SIZE)
    double = head[found + len(FLV_FILE_SIZE) :][:8]
    if found < 0 or len(double) < 8:
        return None
    (size,) = struct.unpack(">d", double)
    return int(size) if 0 < size < MAX_FLV_BYTES else None


def _matroska_bytes(head: bytes) -> int | None:
    """Return the end of the segment element after the EBML header; live recordings leave its size open."""
    start, length = _element_size(head, 4)
    if length is None or head[start + length : start + length + 4] != EBML_SEGMENT:
        return None
    start, length = _element_size(head, start + length + 4)
    return None if length is None else start + length


def _element_size(head: bytes, offset: int) -> tuple[int, int | None]:
    """Read an EBML variable-length size: where the content starts, and its length (None: unknown)."""
    first = head[offset] if offset < len(head) else 0
    num_bytes = 9 - first.bit_length()
    if num_bytes > 8 or offset + num_bytes > len(head):
        return offset, None
    all_ones = (1 << 7 * num_bytes) - 1  # the reserved value for "unknown"
    value = int.from_bytes(head[offset : offset + num_bytes], "big") & all_ones
    return offset + num_bytes, None if value == all_ones else value


def _mp4_bytes(file: BinaryIO) -> int | None:
    """Return the end of the last known outermost box; an unknown one counts as trailing garbage."""
    end = 0
    for _ in range(MAX_MP4_BOXES):
        file.seek(end)
        header = file.read(16)
        size = int.from_bytes(header[:4], "big")
        if size == 1:
            size = int.from_bytes(header[8:16], "big")
        if size < 8 or header[4:8] not in MP4_BOXES:
            break
        end += size
    return end
