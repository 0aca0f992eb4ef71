"""Reads the values of the medium's columns from headers alone, for rows that were embedded before there were columns.

Runs in the sandbox process, on a file of which only the ranges that are asked for are fetched. What needs the pixels or
all bytes stays null. HEIC, WebP and AVIF are read whole, as their readers take no less.
"""

import io
from collections.abc import Collection
from typing import Any, BinaryIO

from PIL import Image

from embedder.media.formats import HEIC, JPEG_XL
from embedder.media.images import FORMATS, MAX_DRAFT_REDUCTION, ORIENTATION_TAG, form_of, note_form
from embedder.media.loaded_image import PictureForm
from embedder.media.medium_values import picture_values
from embedder.media.metadata_blocks import read_blocks
from embedder.media.sniff import HEAD_BYTES, extra_kind, sniff


def header_values(file: BinaryIO, max_pixels: int, max_file_bytes: int, columns: Collection[str]) -> dict[str, Any]:
    """Return the values of some columns; raises a DecodeError, or what a reader of the format raises.

    Args:
        file: seekable; read at most up to `max_file_bytes` from its start if its format needs it whole.
        max_pixels: as for decoding; a picture that is too large to be decoded is refused here, too.
        max_file_bytes: limit of what is read at once.
        columns: names of the columns.
    """
    head = file.read(HEAD_BYTES)
    file.seek(0)
    extra = extra_kind(head)
    if extra is None and sniff(head) == "video":
        from embedder.media.videos import read_clip_values

        return read_clip_values(file, max_pixels, columns)
    if extra == HEIC.name:
        import pillow_heif

        encoded = file.read(max_file_bytes)
        images = pillow_heif.open_heif(encoded)
        primary = images[images.primary_index]
        form = PictureForm("HEIC", primary.size, primary.mode)
        return picture_values(form, primary, io.BytesIO(encoded), columns)
    if extra == JPEG_XL.name:
        from embedder.media.extra_formats.jpeg_xl import declared_size

        return picture_values(PictureForm("JXL", declared_size(head) or (0, 0)), None, file, columns)
    if extra is not None:
        return picture_values(PictureForm("RAW", (0, 0)), None, file, columns)
    Image.MAX_IMAGE_PIXELS = max_pixels * MAX_DRAFT_REDUCTION
    image = Image.open(file, formats=FORMATS)
    note_form(image)
    turn = read_blocks(image, file).exif.get(ORIENTATION_TAG, 1)  # Pillow would decode a PNG to look behind its pixels
    return picture_values(form_of(image, turn if isinstance(turn, int) else 1), image, file, columns)
