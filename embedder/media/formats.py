"""Supported image formats. An entry makes one known to listings, to recognition by content, and to Pillow.

Those of the extra `formats` are recognised everywhere, and decoded if their package is installed.
"""

from typing import NamedTuple


class ImageFormat(NamedTuple):
    """Format of images that Pillow reads.

    `name` in capitals is Pillow's name, and `plugin` its module that reads the format. `suffixes` are in lower case. A
    file starts with one of `signatures`; there are none if `sniff.py` needs more than a comparison.
    """

    name: str
    plugin: str
    suffixes: tuple[str, ...]
    signatures: tuple[bytes, ...] = ()


IMAGE_FORMATS = (
    ImageFormat("JPEG", "JpegImagePlugin", (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"), (b"\xff\xd8\xff",)),
    ImageFormat("PNG", "PngImagePlugin", (".png", ".apng"), (b"\x89PNG\r\n\x1a\n",)),
    ImageFormat("WebP", "WebPImagePlugin", (".webp",)),
    ImageFormat("GIF", "GifImagePlugin", (".gif",), (b"GIF87a", b"GIF89a")),
    ImageFormat("BMP", "BmpImagePlugin", (".bmp",)),
    ImageFormat("TIFF", "TiffImagePlugin", (".tif", ".tiff"), (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")),
    ImageFormat("AVIF", "AvifImagePlugin", (".avif", ".avifs")),
)
"""`JPEG` includes MPO, its multi-picture form."""


class ExtraFormat(NamedTuple):
    """Format of images that the import `package` of the extra `formats` decodes; `suffixes` are in lower case."""

    name: str
    package: str
    suffixes: tuple[str, ...]


HEIC = ExtraFormat("HEIC", "pillow_heif", (".heic", ".heics", ".heif", ".heifs", ".hif"))
JPEG_XL = ExtraFormat("JXL", "pillow_jxl", (".jxl",))
RAW_SUFFIXES = (
    ".3fr .arw .cr2 .cr3 .crw .dcr .dng .erf .fff .gpr .iiq .k25 .kdc .mef .mos .mrw .nef .nrw .orf .pef .raf .raw .rw2"
    " .rwl .sr2 .srf .srw .x3f"
)
CAMERA_RAW = ExtraFormat("RAW", "rawpy", tuple(RAW_SUFFIXES.split()))
EXTRA_FORMATS = (HEIC, JPEG_XL, CAMERA_RAW)
"""`HEIC` includes HEIF and HIF, whatever they hold except AV1."""
