"""Text of captions as cameras, programs and services write it: cleaned, and told from what nobody wrote.

Imports neither Pillow nor a parser: sources use it, too.
"""

import html
import re
from collections.abc import Iterable

from embedder.storage.printable import is_text, readable

MAX_CAPTION_CHARACTERS = 1 << 16  # more than any text tower reads; the rest is cut
MAX_KEYWORDS = 1000
UTF8_MARK = b"\xef\xbb\xbf"

_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufeff\ufffe\uffff]+")
_ENTITY = re.compile(r"&(?:[A-Za-z]{2,8}|#\d{1,7}|#[xX][0-9A-Fa-f]{1,6});")
_TAG = re.compile(r"<(/?)([A-Za-z][A-Za-z0-9]*)\b[^<>]*>")
_BLOCKS = frozenset(("br", "p", "div", "li", "tr", "td"))
_HIDDEN = re.compile(r"<(style|script)\b[^<>]*>.*?</\1\s*>|<!--.*?-->", re.IGNORECASE | re.DOTALL)

_PLACEHOLDER = re.compile(
    "|".join(
        (
            # cameras: `OLYMPUS DIGITAL CAMERA`, `SONY DSC`, `Exif_JPEG_PICTURE`, `<Digimax i5, Samsung #1>`
            r"(?:[\w.<>-]+ ){0,3}digital (?:still ?)?camera",
            r"(?:sony )?dsc|sony|samsung(?: camera pictures)?|minolta dsc|kodak|benq dc.*|hisilicon k3|mediatek camera.*",
            r"(?:exif[_ ]?)?jpeg(?:[_ ]picture)?|<?digimax .*|hewlett-packard|hp photosmart.*|jpeg image|image description",
            # drones and phones: a path on the card, the name of a scene
            r"dcim[\\/].*|default|screenshot|untitled|unnamed|none|null|n/a",
            r"(?:cof|edf|nor|sdr|hdr|hdrpl|rhdr|rpt|rbt|bty|btf|fbt|mde|ptr|dav|srb|burst|o?znor|fznor|ptfbty|fptbty|rptnr)"
            r"(?:_?(?:soft|vivid|bright|000|wo|hdr))*",
            r"(?:\s*[\w.]+ ?: ?[^;:]{0,40};){2,}.*",  # settings of a filter: `filter: 0; intensity: 0.0;`
            # programs
            r"(?:created|written|processed|generated) (?:with|by) (?:the )?(?:gimp|imagegear|imagemagick|paint|ebay).*",
            r"lead technologies inc\. v[\d.]+|acd systems digital imaging|applemark|creator: gd-jpeg.*",
            r"file written by adobe photoshop.*|handmade software, inc\. image alchemy.*|intel\(r\) jpeg library.*",
            # names of files: `IMG_1234`, `DSC_0001.JPG`
            r"[^\s/\\]+\.(?:jpe?g|png|heic|heif|tiff?|webp|gif|bmp|mp4|mov|dng|nef|cr[23]|arw|raf|orf|rw2)",
            r"(?:img|dsc[nf]?|dscf|pict|imgp|mvi|gopr|pxl|vid|p[0-9a-f]|dji|wp|scan|image|photo)[_ -]?\d{3,}[\d_-]*",
        )
    ),
    re.IGNORECASE,
)
"""What cameras and programs write where a caption is due."""


def clean_caption(text: str) -> str:
    """Clean a caption: entities become characters, controls spaces; empty if it is what a camera or program writes."""
    cleaned = clean_line_ends(text)
    return "" if _PLACEHOLDER.fullmatch(" ".join(cleaned[:200].split())) else cleaned


def clean_line_ends(text: str) -> str:
    """Clean a text without judging whether a person wrote it."""
    text = text[: 2 * MAX_CAPTION_CHARACTERS]
    if _ENTITY.search(text):
        text = html.unescape(text)
    text = _CONTROLS.sub(" ", text.replace("\r\n", "\n").replace("\r", "\n")).strip()[:MAX_CAPTION_CHARACTERS]
    return text if is_text(text) else readable(text)


def clean_keywords(texts: Iterable[str]) -> list[str]:
    """Clean keywords; each once, in the order in which they come, whatever its case."""
    found: dict[str, str] = {}
    for text in texts:
        keyword = " ".join(clean_line_ends(text[:1000]).split())
        if keyword and len(found) < MAX_KEYWORDS:
            found.setdefault(keyword.casefold(), keyword)
    return list(found.values())


def text_of_html(text: str) -> str:
    """Return the text of a piece of HTML, without its tags, styles and scripts."""
    text = _HIDDEN.sub(" ", text[: 4 * MAX_CAPTION_CHARACTERS])
    text = _TAG.sub(lambda tag: " " if tag[2].lower() in _BLOCKS else "", text)
    return " ".join(html.unescape(text).split())


def decode_legacy(data: bytes, *, may_be_cut: bool = False) -> str:
    """Decode text whose encoding isn't told: UTF-8 where it is valid, else Windows-1252, else Latin-1.

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
