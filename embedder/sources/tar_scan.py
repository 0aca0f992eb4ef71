"""Lists the members of a plain tar from their headers only: nothing is unpacked, and no name touches the file system.

The loop is our own, and `tarfile` parses only each 512-byte header: its iterator stops silently at a header it can't
read, keeps every member, and reads extended headers of any size into memory.

Source: POSIX.1-2008 pax, "ustar Interchange Format" and "pax Extended Header"; GNU tar manual, "Basic Tar Format".
"""

import tarfile
from collections.abc import Iterator
from typing import NamedTuple

from embedder.storage.file_adapter import ByteRanges

BLOCK_BYTES = 512
PACKED_TAR_SUFFIXES = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst")
MAX_EXTENDED_BYTES = 1 << 20  # a long name or a pax header; real ones have some hundred bytes
MAX_TAIL_BYTES = 1 << 20  # checked after the end marker; writers pad to 10 KiB
_GNU_LONG_NAME, _GNU_LONG_LINK = b"L", b"K"
_PAX, _PAX_GLOBAL, _PAX_SOLARIS = b"x", b"g", b"X"
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_KINDS = {
    tarfile.LNKTYPE: "a hard link",
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a named pipe",
    tarfile.DIRTYPE: "a folder",
    tarfile.GNUTYPE_SPARSE: "a sparse file",
}


class Member(NamedTuple):
    """One member: its data are `size` bytes from `offset` of the tar. `kind` is set if it is no regular file."""

    name: str
    offset: int
    size: int
    kind: str | None = None


class BrokenTarError(Exception):
    """The tar can't be read beyond this point; everything before it is intact."""


def compression_of(ranges: ByteRanges) -> str | None:
    """Detect a file's compression from its first bytes; None if there is none."""
    start = ranges.read_at(0, 8)
    return next((name for magic, name in _COMPRESSED.items() if start.startswith(magic)), None)


def scan_members(ranges: ByteRanges) -> Iterator[Member]:
    """Yield the members in order, skipping data; BrokenTarError for a damaged tar, FetchError if unreadable."""
    offset = 0
    overrides: dict[str, str] = {}
    while (block := _header_block(ranges, offset)) is not None:
        header = _parse(block, offset)
        data = offset + BLOCK_BYTES
        if header.type in (_GNU_LONG_NAME, _GNU_LONG_LINK, _PAX, _PAX_SOLARIS, _PAX_GLOBAL):
            overrides |= _extension(ranges, header, data)
            offset = data + _padded_size(header.size)
            continue
        if header.type == tarfile.GNUTYPE_SPARSE:
            data = _skip_sparse_map(ranges, block, data)
        size = _size(header, overrides, offset)
        stored = size if header.isreg() or header.type not in tarfile.SUPPORTED_TYPES else 0
        name = overrides.get("path", header.name)
        if data + stored > ranges.size:
            raise BrokenTarError(f"member {name!r} ends at byte {data + stored:,}, the file at {ranges.size:,}")
        is_sparse = any(key.startswith("GNU.sparse") for key in overrides)
        yield Member(name, data, stored, "a sparse file" if is_sparse else _kind(header))
        offset = data + _padded_size(stored)
        overrides = {}
    _check_tail(ranges, offset)


def check_member(header_block: bytes, name: str, size: int) -> bool:
    """Return whether the 512 bytes before a member's data are still its header, with the listed name and size.

    They aren't if the tar was rewritten.
    """
    try:
        header = tarfile.TarInfo.frombuf(header_block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    is_short = name.isascii() and len(name) < 100  # other names are in an extension before the header
    return header.size in (size, 0) and (not is_short or header.name == name)


def _header_block(ranges: ByteRanges, offset: int) -> bytes | None:
    block = ranges.read_at(offset, BLOCK_BYTES)
    if len(block) < BLOCK_BYTES:
        raise BrokenTarError(f"the file ends at byte {ranges.size:,} without an end marker")
    return None if not any(block) else block


def _parse(block: bytes, offset: int) -> tarfile.TarInfo:
    try:
        header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        raise BrokenTarError(f"no member header at byte {offset:,} ({error})") from None
    if header.size < 0:
        raise BrokenTarError(f"the header at byte {offset:,} gives a negative size")
    return header


def _extension(ranges: ByteRanges, header: tarfile.TarInfo, data: int) -> dict[str, str]:
    if header.size > MAX_EXTENDED_BYTES:
        raise BrokenTarError(f"the extended header at byte {data - BLOCK_BYTES:,} claims {header.size:,} bytes")
    body = ranges.read_at(data, header.size)
    if len(body) < header.size:
        raise BrokenTarError(f"the file ends at byte {ranges.size:,} inside an extended header")
    if header.type == _GNU_LONG_NAME:
        return {"path": body.rstrip(b"\0").decode("utf-8", "surrogateescape")}
    return _pax_records(body, data) if header.type in (_PAX, _PAX_SOLARIS) else {}


def _pax_records(body: bytes, data: int) -> dict[str, str]:
    """Read records `<length> <key>=<value>` that end in a newline; the length counts the whole record."""
    records: dict[str, str] = {}
    while body and body[0]:
        digits, _, _ = body[:20].partition(b" ")
        if not digits.isdigit() or not len(digits) + 2 < int(digits) <= len(body):
            raise BrokenTarError(f"the pax header at byte {data - BLOCK_BYTES:,} is damaged")
        record, body = body[len(digits) + 1 : int(digits) - 1], body[int(digits) :]
        key, _, value = record.partition(b"=")
        records[key.decode("utf-8", "surrogateescape")] = value.decode("utf-8", "surrogateescape")
    return records


def _size(header: tarfile.TarInfo, overrides: dict[str, str], offset: int) -> int:
    text = overrides.get("size")
    if text is None:
        return header.size
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise BrokenTarError(f"the member at byte {offset:,} has the size {text[:20]!r}")
    return int(text)


def _skip_sparse_map(ranges: ByteRanges, block: bytes, data: int) -> int:
    """Skip the blocks of an old GNU sparse map; a flag in each says whether another follows."""
    more = block[482]
    while more:
        block = ranges.read_at(data, BLOCK_BYTES)
        data += BLOCK_BYTES
        more = len(block) == BLOCK_BYTES and block[504]
    return data


def _kind(header: tarfile.TarInfo) -> str | None:
    if header.type in _KINDS:
        return _KINDS[header.type]
    return None if header.isreg() else f"of the unknown type {header.type!r}"


def _padded_size(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def _check_tail(ranges: ByteRanges, offset: int) -> None:
    tail = ranges.read_at(offset, min(MAX_TAIL_BYTES, ranges.size - offset))
    if any(tail):
        raise BrokenTarError(f"more data follow the end marker at byte {offset:,} (two tars joined by `cat`?)")
