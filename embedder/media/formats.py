"""Formats of images that are read. An entry makes one known to listings, to recognition by content, and to Pillow.

Those of the extra `formats` are recognised everywhere, and decoded where their package is installed.
"""

from typing import NamedTuple


class ImageFormat(NamedTuple):
    """Format of images.

    Attributes:
        name: as people write it; in capitals, as Pillow has it.
        plugin: Pillow's module that reads it.
        suffixes: of its files, in lower case.
        signatures: first bytes, any of them; none where more than a comparison is needed, which `sniff.py` has.
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
"""`JPEG` covers MPO, its multi-picture form."""


class ExtraFormat(NamedTuple):
    """Format of images that a package of the extra `formats` decodes.

    Attributes:
        name: as messages say it; of camera raws each maker's kind has its own (`embedder/media/raw_kinds.py`).
        package: by the name that it is imported under.
        suffixes: of its files, in lower case.
    """

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
"""`HEIC` covers HEIF and HIF, whatever they hold but AV1."""
