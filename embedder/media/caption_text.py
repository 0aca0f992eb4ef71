"""Text of captions as cameras, programs and services write it: cleaned, and distinguished from what nobody wrote.

Imports neither Pillow nor a parser: sources use it, too.
"""

import html
import re
from collections.abc import Iterable

from embedder.storage.printable import is_text, readable

MAX_CAPTION_CHARACTERS = 1 << 14  # more than any text tower reads; the rest is cut
MAX_KEYWORD_CHARACTERS = 4000  # of all together: eight files' answers must fit a message of the sandbox

_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufeff\ufffe\uffff]+")
_ENTITY = re.compile(r"&(?:[A-Za-z]{2,8}|#\d{1,7}|#[xX][0-9A-Fa-f]{1,6});")
_PLACEHOLDER = re.compile(
    "|".join(
        (
            # cameras: `OLYMPUS DIGITAL CAMERA`, `SONY DSC`, `Exif_JPEG_PICTURE`, `<Digimax i5, Samsung #1>`
            r"(?:[\w.<>-]+ ){0,3}digital (?:still ?)?camera",
            r"(?:sony )?dsc|sony|samsung(?: camera pictures)?|minolta dsc|kodak|benq dc.*|hisilicon k3|jpeg image",
            r"(?:exif[_ ]?)?jpeg(?:[_ ]picture)?|<?digimax .*|hewlett-packard|hp photosmart.*|mediatek camera.*",
            # drones and phones: a path on the card, the name of a scene
            r"dcim[\\/].*|default|screenshot|untitled|unnamed|none|null|n/a|image description",
            r"(?:cof|edf|nor|sdr|hdr|hdrpl|rhdr|rpt|rbt|bty|btf|fbt|mde|ptr|dav|srb|burst|o?znor|fznor|ptfbty|fptbty|rptnr)"
            r"(?:_?(?:soft|vivid|bright|000|wo|hdr))*",
            # settings of a filter: `filter: 0; intensity: 0.0;`
            r"(?:file?ter(?:intensity)?|mask|module|touch|jpegrotation) ?: ?[^;]{0,40};.*",
            # programs
            r"(?:created|written|processed|generated) (?:with|by) (?:the )?(?:gimp|imagegear|imagemagick|paint|ebay).*",
            r"lead technologies inc\. v[\d.]+|acd systems digital imaging|applemark|creator: gd-jpeg.*",
            r"file written by adobe photoshop.*|handmade software, inc\. image alchemy.*|intel\(r\) jpeg library.*",
            # names of files: `IMG_1234`, `DSC_0001.JPG`
            r"[^\s/\\]+\.(?:jpe?g|png|heic|heif|tiff?|webp|gif|bmp|mp4|mov|dng|nef|cr[23]|arw|raf|orf|rw2)",
            r"(?:img|dsc[nf]?|dscf|pict|imgp|mvi|gopr|pxl|vid|p[0-9a-f]|dji|wp)[_ -]?\d{3,}[\d_-]*",
            r"(?:scan|image|photo)[_-]?\d{3,}[\d_-]*",
        )
    ),
    re.IGNORECASE,
)
"""What cameras and programs write where a caption is due."""


def clean_caption(text: str) -> str:
    """Clean a caption: entities become characters, controls spaces; empty if it is what a camera or program writes."""
    cleaned = unescape_text(text)
    return "" if _PLACEHOLDER.fullmatch(" ".join(cleaned[:200].split())) else cleaned


def unescape_text(text: str) -> str:
    """Clean a text without judging whether a person wrote it."""
    text = text[: 2 * MAX_CAPTION_CHARACTERS]
    if _ENTITY.search(text):
        text = html.unescape(text)
    text = _CONTROLS.sub(" ", text.replace("\r\n", "\n").replace("\r", "\n")).strip()[:MAX_CAPTION_CHARACTERS]
    return text if is_text(text) else readable(text)


def clean_keywords(texts: Iterable[str]) -> list[str]:
    """Clean keywords; each once, in the order in which they come, whatever its case."""
    found: dict[str, str] = {}
    room = MAX_KEYWORD_CHARACTERS
    for text in texts:
        keyword = " ".join(unescape_text(text[:1000]).split())
        if keyword and keyword.casefold() not in found:
            if (room := room - len(keyword) - 1) < 0:
                break
            found[keyword.casefold()] = keyword
    return list(found.values())
