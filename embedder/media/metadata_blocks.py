"""Reads the metadata blocks of an opened image: Exif, XMP, IPTC and text. Runs in the sandbox process.

Pillow finds the blocks and reads the directories of Exif and the records of IPTC; expat reads XMP. Nothing here raises
for what a file holds: a block that is broken, or larger than any camera or program writes, is left out with a note.
Sources: Exif 2.32; XMP, ISO 16684-1; IPTC-IIM 4.2.
"""

import io
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any, BinaryIO
from xml.etree.ElementTree import TreeBuilder, XMLParser

from PIL import IptcImagePlugin
from PIL.TiffImagePlugin import ImageFileDirectory_v2

MAX_EXIF_BYTES = 16 << 20  # previews included; a TIFF or camera raw is its own block and may be larger
MAX_XMP_BYTES = 2 << 20  # histories of edits have some hundred kilobytes
MAX_IPTC_BYTES = 1 << 20
MAX_TEXT_CHARACTERS = 1 << 16
MAX_TAGS = 2000  # of one directory; a DNG has about 150
MAX_XMP_ELEMENTS = 50_000
MAX_NOTE_CHARACTERS = 200

EXIF_DIRECTORY, GPS_DIRECTORY = 0x8769, 0x8825
"""Tags of the first directory that point to the other two."""
XMP_TAG, IPTC_TAG = 700, 33723  # of a TIFF
IPTC_RESOURCE = 0x0404  # of Photoshop's block in a JPEG

JPEG_APPS = tuple(bytes([number]) for number in range(0xE0, 0xF0))
TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
BIG_TIFF = (b"+\0", b"\0+")
VALUE_BYTES = (0, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8, 4, 0, 0, 8, 8, 8)
"""Bytes of a value by its type (Source: TIFF 6.0, section 2; BigTIFF's 16 to 18)."""

RDF = "{http://www.w3.org/1999/02/22-rdf-syntax-ns#}"
LANGUAGE = "{http://www.w3.org/XML/1998/namespace}lang"
PREFIXES = {
    "http://purl.org/dc/elements/1.1/": "dc",
    "http://ns.adobe.com/xap/1.0/": "xmp",
    "http://ns.adobe.com/xap/1.0/rights/": "xmpRights",
    "http://ns.adobe.com/photoshop/1.0/": "photoshop",
    "http://ns.adobe.com/tiff/1.0/": "tiff",
    "http://ns.adobe.com/exif/1.0/": "exif",
    "http://cipa.jp/exif/1.0/": "exifEX",
    "http://ns.adobe.com/exif/1.0/aux/": "aux",
    "http://ns.adobe.com/lightroom/1.0/": "lr",
    "http://iptc.org/std/Iptc4xmpCore/1.0/xmlns/": "Iptc4xmpCore",
    "http://iptc.org/std/Iptc4xmpExt/2008-02-29/": "Iptc4xmpExt",
    "http://ns.microsoft.com/photo/1.0/": "MicrosoftPhoto",
    "http://www.digikam.org/ns/1.0/": "digiKam",
    "http://ns.google.com/photos/1.0/panorama/": "GPano",
}
"""Prefixes under which properties of XMP are known, by their namespace; those of others are left out."""

UNREADABLE = "unreadable_metadata"
"""Key of `Image.info` for why an image was opened without its metadata."""
NO_TEXTS = ("Raw profile type exif", "Raw profile type iptc", "Raw profile type xmp", "XML:com.adobe.xmp")
"""Blocks that PNG keeps as text."""

Tags = Mapping[int, Any]
"""Values of a directory of Exif by tag, as Pillow reads them."""
NO_TAGS: Tags = MappingProxyType({})


class MetadataError(ValueError):
    """A block is larger than any camera or program writes, or has what its format hasn't; it becomes a note."""


@dataclass(frozen=True)
class XmpText:
    """Text of an XMP property; `language` is that of one of several alternatives, such as `de` or `x-default`."""

    text: str
    language: str | None = None


@dataclass(frozen=True)
class MetadataBlocks:
    """Metadata of one image.

    `exif`, `exif_details` and `gps` are the first directory of Exif, and the two that it points to (a TIFF's own tags
    included). `xmp` has the texts of each property, by name (`dc:title`), in the file's order. `iptc` has the values of
    each data set, by record and number. `text` has PNG's keywords and, as `comment`, the comment of a JPEG or GIF.
    `notes` say what was left out and why.
    """

    exif: Tags = field(default_factory=dict)
    exif_details: Tags = field(default_factory=dict)
    gps: Tags = field(default_factory=dict)
    xmp: Mapping[str, tuple[XmpText, ...]] = field(default_factory=dict)
    iptc: Mapping[tuple[int, int], tuple[bytes, ...]] = field(default_factory=dict)
    text: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read_blocks(opened: Any, file: BinaryIO | None = None) -> MetadataBlocks:
    """Read the metadata of an image opened by Pillow or one of its plug-ins.

    Args:
        opened: the image; before a PNG is loaded, what follows its pixels is not known yet. None if only its file is
            known, as of a camera raw.
        file: the file itself, seekable, in which the directories of a TIFF or of many camera raws lie.
    """
    opened = SimpleNamespace(info={}) if opened is None else opened
    info, notes = opened.info, list[str]()
    if reason := info.get(UNREADABLE):
        notes.append(f"the metadata is broken: {reason}")
    first, details, gps = NO_TAGS, NO_TAGS, NO_TAGS
    with _note_failure("Exif", notes):
        block, first = _first_directory(opened, file)
        for tag, name in ((EXIF_DIRECTORY, "Exif's second directory"), (GPS_DIRECTORY, "GPS")):
            if block is not None and tag in first:
                with _note_failure(name, notes):
                    found = read_directory(block, tag, first[tag])
                    details, gps = (found, gps) if tag == EXIF_DIRECTORY else (details, found)
    xmp, iptc = dict[str, tuple[XmpText, ...]](), dict[tuple[int, int], tuple[bytes, ...]]()
    with _note_failure("XMP", notes):
        xmp = read_xmp(_xmp_block(info, first))
    with _note_failure("IPTC", notes):
        iptc = _read_iptc(opened)
    return MetadataBlocks(first, details, gps, xmp, iptc, _texts(info), tuple(notes))


def without_jpeg_metadata(encoded: bytes) -> bytes:
    """Return a JPEG without the segments of Exif, XMP and IPTC (APP1, APP13) before its first other segment."""
    place, kept = 2, [encoded[:2]]
    while encoded[place : place + 1] == b"\xff" and encoded[place + 1 : place + 2] in JPEG_APPS:
        end = place + 2 + int.from_bytes(encoded[place + 2 : place + 4], "big")
        if encoded[place + 1] not in (0xE1, 0xED):
            kept.append(encoded[place:end])
        place = end
    return b"".join([*kept, encoded[place:]]) if encoded[:2] == b"\xff\xd8" else encoded


@contextmanager
def _note_failure(what: str, notes: list[str]) -> Iterator[None]:
    """Note what broken metadata raises: anything, and it must not cost a good image."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - see above
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        notes.append(f"{what} can't be read: {reason[:MAX_NOTE_CHARACTERS]}")


def _refusal(found: str, limit: int) -> MetadataError:
    return MetadataError(f"{found}; at most {limit} are read")


def _first_directory(opened: Any, file: BinaryIO | None) -> tuple[BinaryIO | None, Tags]:
    """Return the file that offsets refer to, and its first directory; a TIFF's was read by Pillow."""
    if (tags := getattr(opened, "tag_v2", None)) is not None:
        return file, tags
    if block := _exif_block(opened.info):
        return (found := io.BytesIO(block)), read_directory(found)
    if file is not None and file.seek(0) == 0 and file.read(4) in TIFF_STARTS:
        return file, read_directory(file)
    return None, NO_TAGS


def _exif_block(info: Mapping[Any, Any]) -> bytes:
    block = info.get("exif") or _raw_profile(info, "exif", MAX_EXIF_BYTES)
    if not isinstance(block, bytes):
        return b""
    if len(block) > MAX_EXIF_BYTES:
        raise _refusal(f"{len(block)} bytes", MAX_EXIF_BYTES)
    while block.startswith(b"Exif\0\0"):
        block = block[6:]
    return block


def _raw_profile(info: Mapping[Any, Any], name: str, max_bytes: int) -> bytes:
    """Return a block that ImageMagick has written into a PNG, as hexadecimal text; empty if there is none."""
    profile = info.get(f"Raw profile type {name}")
    return bytes.fromhex("".join(profile[: 2 * max_bytes + 100].split("\n")[3:])) if isinstance(profile, str) else b""


def read_directory(file: BinaryIO, group: int | None = None, offset: int | None = None) -> ImageFileDirectory_v2:
    """Read one directory of an Exif or TIFF; values are decoded when they are asked for.

    Args:
        file: from the byte order on, all that offsets refer to.
        group: tag of the directory that points to this one; None: it is the first one.
        offset: its place in the file; None: that of the first one.

    Raises a MetadataError if it has more tags than are read, or claims more bytes than it has, or what Pillow raises.
    """
    size = file.seek(0, io.SEEK_END)
    head = _read_head(file)
    directory = ImageFileDirectory_v2(head if head[2:4] in BIG_TIFF else head[:8], group=group)
    start = directory.next if offset is None else offset
    _check_directory(file, start, head, min(size, MAX_EXIF_BYTES))
    file.seek(start)
    directory.load(file)
    return directory


def check_exif(info: Mapping[Any, Any]) -> None:
    """Raise a MetadataError for an Exif whose first directory would fill the memory: Pillow before 13 reads it all."""
    if block := _exif_block(info):
        head = _read_head(file := io.BytesIO(block))
        start = ImageFileDirectory_v2(head if head[2:4] in BIG_TIFF else head[:8]).next
        with suppress(struct.error):  # it is cut off: Pillow reads what is there
            _check_directory(file, start, head, MAX_EXIF_BYTES)


def _read_head(file: BinaryIO) -> bytes:
    file.seek(0)
    return file.read(16)


def _check_directory(file: BinaryIO, start: int, head: bytes, limit: int) -> None:
    """Refuse a directory whose values lie upon each other: 65,535 tags may point to the same megabytes."""
    order, is_big = "<" if head[:2] == b"II" else ">", head[2:4] in BIG_TIFF
    counter, entry = (order + "Q", order + "HHQ8x") if is_big else (order + "H", order + "HHL4x")
    size = file.seek(0, io.SEEK_END)
    file.seek(start)
    (num_tags,) = struct.unpack(counter, file.read(struct.calcsize(counter)))
    num_bytes = struct.calcsize(entry)
    listed = file.read(min(num_tags, MAX_TAGS + 1) * num_bytes)
    if len(listed) > MAX_TAGS * num_bytes:
        raise _refusal(f"a directory of {num_tags} tags", MAX_TAGS)
    whole = len(listed) - len(listed) % num_bytes
    known = (each for each in struct.iter_unpack(entry, listed[:whole]) if each[1] < len(VALUE_BYTES))
    sizes = (count * VALUE_BYTES[kind] for _, kind, count in known)
    claimed = sum(each for each in sizes if each <= size)  # a longer one is not read at all
    if claimed > limit:
        raise _refusal(f"a directory that claims {claimed} bytes", limit)


def _xmp_block(info: Mapping[str, Any], tags: Tags) -> bytes:
    block = (
        info.get("xmp")
        or info.get("XML:com.adobe.xmp")
        or tags.get(XMP_TAG)
        or _raw_profile(info, "xmp", MAX_XMP_BYTES)
    )
    if isinstance(block, tuple) and len(block) == 1:
        block = block[0]
    if isinstance(block, str):
        block = block.encode()
    return block if isinstance(block, bytes) else b""


class _XmpTree(TreeBuilder):
    """Tree of an XMP's elements; a document type, which could define entities, ends the reading."""

    _num_elements = 0

    def start(self, tag: str, attrs: dict[str, str], /) -> Any:
        self._num_elements += 1
        if self._num_elements > MAX_XMP_ELEMENTS:
            raise _refusal("a tree of more elements", MAX_XMP_ELEMENTS)
        return super().start(tag, attrs)

    def doctype(self, name: str, pubid: str | None, system: str | None) -> None:
        raise MetadataError(f"it declares a document type, {name!r}, which XMP has not")


def read_xmp(block: bytes) -> dict[str, tuple[XmpText, ...]]:
    """Read the properties of an XMP packet or sidecar; each with its texts, in order; structures are left out.

    Raises a MetadataError if it is too large or declares a document type, xml.etree.ElementTree.ParseError if it is
    broken.
    """
    if not block:
        return {}
    if len(block) > MAX_XMP_BYTES:
        raise _refusal(f"{len(block)} bytes", MAX_XMP_BYTES)
    parser = XMLParser(target=_XmpTree())  # without a document type there are no entities
    parser.feed(block.strip(b"\0 \t\r\n"))
    found: dict[str, list[XmpText]] = {}

    def add(name: str, text: str | None, language: str | None = None) -> None:
        namespace, _, local = name[1:].partition("}")
        if namespace in PREFIXES and text and (text := text.strip()):
            found.setdefault(f"{PREFIXES[namespace]}:{local}", []).append(XmpText(text, language))

    for properties in parser.close().iter(f"{RDF}RDF"):
        for description in properties.findall(f"{RDF}Description"):
            for name, value in description.attrib.items():
                add(name, value)
            for each in description:
                for item in each.findall(f"*/{RDF}li") or [each]:
                    add(each.tag, item.text, item.get(LANGUAGE))
    return {name: tuple(texts) for name, texts in found.items()}


def _read_iptc(opened: Any) -> dict[tuple[int, int], tuple[bytes, ...]]:
    resources, tags = opened.info.get("photoshop"), getattr(opened, "tag_v2", NO_TAGS)
    block = resources.get(IPTC_RESOURCE) if isinstance(resources, dict) else tags.get(IPTC_TAG)
    if block is None:
        return {}
    num_bytes = len(block) if isinstance(block, bytes) else 4 * len(block if isinstance(block, tuple) else (block,))
    if num_bytes > MAX_IPTC_BYTES:
        raise _refusal(f"{num_bytes} bytes", MAX_IPTC_BYTES)
    records = IptcImagePlugin.getiptcinfo(opened) or {}
    several = ((key, value if isinstance(value, list) else [value]) for key, value in records.items())
    return {key: tuple(each for each in values if each) for key, values in several}


def _texts(info: Mapping[str, Any]) -> dict[str, str]:
    texts = {}
    for name, value in info.items():
        is_comment = isinstance(value, bytes) and name == "comment"
        text = value[:MAX_TEXT_CHARACTERS].decode(errors="replace") if is_comment else value
        if isinstance(text, str) and 0 < len(text) <= MAX_TEXT_CHARACTERS and name not in NO_TEXTS:
            texts[name] = str(text)
    return texts
