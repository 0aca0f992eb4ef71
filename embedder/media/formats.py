"""Formats of images that are read. An entry makes one known to listings, to recognition by content, and to Pillow."""

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
