"""Decodes HEIC and HEIF with libheif; of a file with several images, only the primary one."""

from collections.abc import Iterator

import pillow_heif
from PIL import Image

from embedder.media.colour import CICP
from embedder.media.colour_tags import heif_cicp
from embedder.media.images import WHOLE_FACTOR, check_pixels
from embedder.media.loaded_image import LoadedImage, PictureForm
from embedder.media.media_errors import DecodeError
from embedder.media.resize import ResizeSpec, Size

UPRIGHT = 1
NO_MEMORY, LIMIT = "Memory allocation error", "Security limit"
SIZE_PROPERTY = b"ispe\0\0\0\0"  # followed by width and height, 32 bits each


def load(kind: str, encoded: bytes, resize: ResizeSpec, max_pixels: int) -> LoadedImage:
    """Decode the primary image; its EXIF orientation is ignored, because libheif applies the container's rotation.

    Source: ISO/IEC 23008-12 (HEIF). Raises a DecodeError if libheif decodes no image in it, or one that is too large.
    """
    for option in ("THUMBNAILS", "DEPTH_IMAGES", "AUX_IMAGES"):  # auxiliary images: a header may list thousands
        setattr(pillow_heif.options, option, False)
    pillow_heif.options.DECODE_THREADS = 1  # several decoders share the machine
    try:
        opened = pillow_heif.open_heif(encoded, convert_hdr_to_8bit=True)
        image = opened[opened.primary_index]
        for size in (image.size, *_declared_sizes(encoded)):  # the visible part may be small
            check_pixels(size, WHOLE_FACTOR * max_pixels)
        image.load()
        decoded = Image.frombytes(image.mode, image.size, image.data, "raw", image.mode, image.stride)
        decoded.info |= {"icc_profile": image.info.get("icc_profile"), CICP: heif_cicp(encoded)}
    except MemoryError:
        raise
    except (OSError, ValueError, SyntaxError, RuntimeError, EOFError, IndexError) as error:
        if NO_MEMORY in str(error) and LIMIT not in str(error):
            raise MemoryError from None
        raise DecodeError("BrokenImage", f"{kind}: libheif can't decode it: {error}") from None
    return LoadedImage(decoded, UPRIGHT, opened=image, form=PictureForm("HEIC", image.size, image.mode))


def _declared_sizes(encoded: bytes) -> Iterator[Size]:
    place = encoded.find(SIZE_PROPERTY)
    while place >= 0:
        size = encoded[place + len(SIZE_PROPERTY) : place + len(SIZE_PROPERTY) + 8]
        yield int.from_bytes(size[:4], "big"), int.from_bytes(size[4:], "big")
        place = encoded.find(SIZE_PROPERTY, place + 1)
