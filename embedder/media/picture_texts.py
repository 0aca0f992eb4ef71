"""Captions and keywords in the metadata of an image: XMP, IPTC and Exif. Runs in the sandbox process.

Sources: XMP, ISO 16684-1; IPTC-IIM 4.2 (2:120, 2:105, 2:5, 2:25, 1:90); Exif 2.32 (UserComment's character codes);
Windows' XP tags, UTF-16.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from embedder.media.caption_text import clean_caption, clean_keywords, decode_legacy
from embedder.media.metadata_blocks import MetadataBlocks, XmpText

XMP_CAPTIONS = ("dc:description", "Iptc4xmpCore:AltTextAccessibility", "photoshop:Headline", "dc:title")
IPTC_CAPTIONS = ((2, 120), (2, 105), (2, 5))
"""Caption or abstract, headline, object name."""
IPTC_CODED_CHARACTER_SET, IPTC_KEYWORDS = (1, 90), (2, 25)
UTF8_ESCAPE = b"\x1b%G"
IMAGE_DESCRIPTION, USER_COMMENT = 0x010E, 0x9286
XP_TITLE, XP_COMMENT, XP_KEYWORDS, XP_SUBJECT = 0x9C9B, 0x9C9C, 0x9C9E, 0x9C9F
X_DEFAULT = "x-default"
MAX_TEXT_BYTES = 1 << 20  # of one value; a longer one is cut


@dataclass(frozen=True)
class PictureTexts:
    """Texts about an image: a caption by place (`xmp`, `iptc`, `exif`) where that has one, and keywords of all."""

    captions: Mapping[str, str] = field(default_factory=dict)
    keywords: Sequence[str] = ()


def texts_of(blocks: MetadataBlocks, languages: Sequence[str] = ()) -> PictureTexts:
    """Find captions and keywords in an image's metadata.

    `languages` are those that are wanted of XMP's alternatives, the best first (`en` is also `en-GB`); without any of
    them, or for want of these, it is the default alternative.
    """
    found = {
        "xmp": (text for name in XMP_CAPTIONS for text in in_order(blocks.xmp.get(name, ()), languages)),
        "iptc": (text for key in IPTC_CAPTIONS for text in _iptc(blocks, key)),
        "exif": _exif_captions(blocks),
    }
    captions = {place: caption for place, texts in found.items() if (caption := next(_cleaned(texts), ""))}
    xp_keywords = _utf16(blocks.exif.get(XP_KEYWORDS), "utf-16-le").split(";")
    subjects = [each.text for each in blocks.xmp.get("dc:subject", ())]
    return PictureTexts(captions, clean_keywords([*subjects, *_iptc(blocks, IPTC_KEYWORDS), *xp_keywords]))


def in_order(texts: Sequence[XmpText], languages: Sequence[str]) -> list[str]:
    """Order alternatives: the wanted languages, the default, any other."""
    wanted = [each.lower() for each in languages]

    def rank(each: XmpText) -> int:
        language = (each.language or X_DEFAULT).lower()
        fitting = (number for number, name in enumerate(wanted) if language == name or language.startswith(f"{name}-"))
        return next(fitting, len(wanted) + (language != X_DEFAULT))

    return [each.text for each in sorted(texts, key=rank)]


def _cleaned(texts: Iterator[str]) -> Iterator[str]:
    return (cleaned for text in texts if (cleaned := clean_caption(text)))


def _iptc(blocks: MetadataBlocks, key: tuple[int, int]) -> Iterator[str]:
    """Yield the texts of a data set: UTF-8 where 1:90 says so or they are, else Windows-1252."""
    is_utf8 = UTF8_ESCAPE in b"".join(blocks.iptc.get(IPTC_CODED_CHARACTER_SET, ()))
    for value in blocks.iptc.get(key, ()):
        yield decode_legacy(value[:MAX_TEXT_BYTES], may_be_cut=is_utf8)


def _exif_captions(blocks: MetadataBlocks) -> Iterator[str]:
    yield _ascii(blocks.exif.get(IMAGE_DESCRIPTION))
    order = "le" if getattr(blocks.exif, "prefix", b"") == b"II" else "be"
    yield read_user_comment(blocks.exif_details.get(USER_COMMENT), order)
    for tag in (XP_COMMENT, XP_TITLE, XP_SUBJECT):
        yield _utf16(blocks.exif.get(tag), "utf-16-le")


def _ascii(value: Any) -> str:
    """Read a text that should be ASCII; programs write UTF-8 or their system's encoding."""
    if isinstance(value, str):  # as Pillow reads it: a character for each byte
        try:
            value = value.encode("latin-1")
        except UnicodeEncodeError:
            return str(value)
    return decode_legacy(value[:MAX_TEXT_BYTES]) if isinstance(value, bytes) else ""


def read_user_comment(value: Any, order: str = "be") -> str:
    """Read Exif's UserComment, whose first eight bytes name its encoding; empty if it isn't one.

    `order` is that of the block's integers, `le` or `be`: the order of UTF-16 where the text doesn't show it.
    """
    data = _as_bytes(value)
    code, text = data[:8].rstrip(b"\0 "), data[8:]
    if code == b"UNICODE":
        return _utf16(text, f"utf-16-{_order_of(text, order)}")
    if code == b"JIS":
        return text.decode("iso2022_jp", errors="ignore")
    if code in (b"ASCII", b""):
        return decode_legacy(text)
    return decode_legacy(data)  # written without a code


def _order_of(text: bytes, otherwise: str) -> str:
    """Return the byte order of UTF-16: by the place of the zeros of Latin letters, if there are any."""
    be, le = text[::2].count(0), text[1::2].count(0)
    if text.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "le" if text[0] == 0xFF else "be"
    return otherwise if be == le else ("be" if be > le else "le")


def _utf16(value: Any, encoding: str) -> str:
    data = _as_bytes(value)
    return data[: len(data) & ~1].decode(encoding, errors="replace").partition("\0")[0]


def _as_bytes(value: Any) -> bytes:
    """Return a value of bytes, however Pillow has read it."""
    if isinstance(value, str):
        return value[:MAX_TEXT_BYTES].encode("latin-1", errors="replace")
    if isinstance(value, tuple) and all(isinstance(each, int) and 0 <= each < 256 for each in value):
        return bytes(value[:MAX_TEXT_BYTES])
    return value[:MAX_TEXT_BYTES] if isinstance(value, bytes) else b""
