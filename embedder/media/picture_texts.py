"""Captions and keywords in the metadata of an image: XMP, IPTC and Exif; and of a clip. Runs in the sandbox process.

Sources: XMP, ISO 16684-1; IPTC-IIM 4.2 (2:120, 2:105, 2:5, 2:25, 1:90); Exif 2.32 (UserComment's character codes);
Windows' XP tags, UTF-16.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from embedder.media.caption_text import clean_caption, clean_keywords
from embedder.media.metadata_blocks import MetadataBlocks, XmpText

XMP_CAPTIONS = ("dc:description", "Iptc4xmpCore:AltTextAccessibility", "photoshop:Headline", "dc:title")
IPTC_CAPTIONS = ((2, 120), (2, 105), (2, 5))
"""Caption or abstract, headline, object name."""
CLIP_CAPTIONS, QUICKTIME = ("description", "title", "comment"), "com.apple.quicktime."
"""Tags of a clip, by FFmpeg's names, which are those of MP4's ©des, ©nam and ©cmt, too."""
IPTC_CODED_CHARACTER_SET, IPTC_KEYWORDS = (1, 90), (2, 25)
UTF8_ESCAPE = b"\x1b%G"
UTF8_MARK = b"\xef\xbb\xbf"
IMAGE_DESCRIPTION, USER_COMMENT = 0x010E, 0x9286
XP_TITLE, XP_COMMENT, XP_KEYWORDS, XP_SUBJECT = 0x9C9B, 0x9C9C, 0x9C9E, 0x9C9F
X_DEFAULT = "x-default"
MAX_TEXT_BYTES = 1 << 18  # of one value; a longer one is cut


def find_captions(blocks: MetadataBlocks, languages: Sequence[str] = ()) -> dict[str, str]:
    """Find captions in an image's metadata: that of each place (`xmp`, `iptc`, `exif`) that has one.

    `languages` are those that are wanted of XMP's alternatives, the best first (`en` is also `en-GB`); without any of
    them, or for want of these, it is the default alternative.
    """
    found = {
        "xmp": (text for name in XMP_CAPTIONS for text in in_order(blocks.xmp.get(name, ()), languages)),
        "iptc": (text for key in IPTC_CAPTIONS for text in _iptc(blocks, key)),
        "exif": _exif_captions(blocks),
    }
    captions = {place: next(filter(None, map(clean_caption, texts)), "") for place, texts in found.items()}
    return {place: caption for place, caption in captions.items() if caption}


def find_clip_captions(tags: Mapping[str, str]) -> dict[str, str]:
    """Find the caption in the tags of a clip's container; its place is `clip`."""
    own = {name.lower().removeprefix(QUICKTIME): text for name, text in tags.items()}
    texts = (clean_caption(own[name]) for name in CLIP_CAPTIONS if name in own)
    caption = next(filter(None, texts), None)
    return {"clip": caption} if caption else {}


def find_keywords(blocks: MetadataBlocks) -> list[str]:
    """Find the keywords in an image's metadata: those of XMP, then IPTC's and Windows'."""
    of_windows = _utf16(blocks.exif.get(XP_KEYWORDS), "utf-16-le").split(";")
    subjects = [each.text for each in blocks.xmp.get("dc:subject", ())]
    return clean_keywords([*subjects, *_iptc(blocks, IPTC_KEYWORDS), *of_windows])


def in_order(texts: Sequence[XmpText], languages: Sequence[str]) -> list[str]:
    """Order alternatives: the wanted languages, the default, any other."""
    wanted = [each.lower() for each in languages]

    def rank(each: XmpText) -> int:
        language = (each.language or X_DEFAULT).lower()
        fitting = (number for number, name in enumerate(wanted) if language == name or language.startswith(f"{name}-"))
        return next(fitting, len(wanted) + (language != X_DEFAULT))

    return [each.text for each in sorted(texts, key=rank)]


def _iptc(blocks: MetadataBlocks, key: tuple[int, int]) -> Iterator[str]:
    """Yield the texts of a data set: UTF-8 where 1:90 says so or they are, else Windows-1252."""
    is_utf8 = UTF8_ESCAPE in b"".join(blocks.iptc.get(IPTC_CODED_CHARACTER_SET, ()))
    for value in blocks.iptc.get(key, ()):
        yield decode_legacy(value[:MAX_TEXT_BYTES], may_be_cut=is_utf8)


def _exif_captions(blocks: MetadataBlocks) -> Iterator[str]:
    yield decode_legacy(_as_bytes(blocks.exif.get(IMAGE_DESCRIPTION)))
    order = "le" if getattr(blocks.exif, "prefix", b"") == b"II" else "be"
    yield read_user_comment(blocks.exif_details.get(USER_COMMENT), order)
    for tag in (XP_COMMENT, XP_TITLE, XP_SUBJECT):
        yield _utf16(blocks.exif.get(tag), "utf-16-le")


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
    return decode_legacy(text if code in (b"ASCII", b"") else data)  # some are written without a code


def decode_legacy(data: bytes, *, may_be_cut: bool = False) -> str:
    """Decode text whose encoding isn't named: UTF-8 where it is valid, else Windows-1252, else Latin-1.

    `may_be_cut` says that it is UTF-8, of which a limit of bytes may have cut the last character.
    """
    data = data.removeprefix(UTF8_MARK).rstrip(b"\0")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        if may_be_cut and error.reason == "unexpected end of data":
            return data[: error.start].decode("utf-8")
    try:
        return data.decode("cp1252")
    except UnicodeDecodeError:
        return data.decode("latin-1")


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
    """Return a value of bytes or text, however Pillow has read it: of text it makes a character of each byte."""
    if isinstance(value, str):
        return value[:MAX_TEXT_BYTES].encode("latin-1", errors="replace")
    if isinstance(value, tuple) and all(isinstance(each, int) and 0 <= each < 256 for each in value):
        return bytes(value[:MAX_TEXT_BYTES])
    return value[:MAX_TEXT_BYTES] if isinstance(value, bytes) else b""
