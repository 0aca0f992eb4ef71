"""Reads the values of the medium's columns only from headers, for rows that were embedded before there were columns.

Runs in the sandbox process, on a file of which only the ranges that are asked for are fetched. What needs the pixels or
all bytes stays null. HEIC, WebP, AVIF and JPEG XL are read whole, as their readers take no less.
"""

import io
from collections.abc import Collection, Sequence
from typing import Any, BinaryIO

from PIL import Image, UnidentifiedImageError

from embedder.media.colour_tags import png_chunks
from embedder.media.formats import HEIC, JPEG_XL
from embedder.media.images import FORMATS, MAX_DRAFT_REDUCTION, ORIENTATION_TAG, form_of, note_form, open_file
from embedder.media.loaded_image import PictureForm
from embedder.media.medium_values import picture_values
from embedder.media.metadata_blocks import MAX_XMP_BYTES, MetadataBlocks, read_blocks, read_xmp
from embedder.media.picture_texts import find_captions, find_clip_captions, find_keywords
from embedder.media.sniff import HEAD_BYTES, extra_kind, sniff

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PNG_END = b"\0\0\0\0IEND\xaeB`\x82"


def header_values(file: BinaryIO, max_pixels: int, max_file_bytes: int, columns: Collection[str]) -> dict[str, Any]:
    """Return the values of some columns; raises a DecodeError, or what a reader of the format raises.

    Args:
        file: seekable; read at most up to `max_file_bytes` from its start if its format needs it whole.
        max_pixels: as for decoding; a picture that is too large to be decoded is refused here, too.
        max_file_bytes: limit of what is read at once.
        columns: names of the columns.
    """
    head = _read_head(file)
    if extra_kind(head) is None and sniff(head) == "video":
        from embedder.media.videos import read_clip_values

        return read_clip_values(file, max_pixels, columns)
    form, opened, file = _open_picture(file, head, max_pixels, max_file_bytes)
    return picture_values(form, opened, file, columns)


def header_texts(file: BinaryIO, max_pixels: int, max_file_bytes: int, languages: Sequence[str]) -> dict[str, Any]:
    """Return `captions` by place, and `keywords`, of a picture, a clip or an XMP sidecar; raises as `header_values`.

    Args:
        file: as for `header_values`, like the two limits; what is neither picture nor clip is read as XMP.
        max_pixels: see there.
        max_file_bytes: see there.
        languages: those that are wanted of XMP's alternatives.
    """
    head = _read_head(file)
    if extra_kind(head) is None and sniff(head) == "video":
        from embedder.media.videos import read_tags

        return {"captions": find_clip_captions(read_tags(file)), "keywords": []}
    if extra_kind(head) is None and sniff(head) != "image":
        blocks = MetadataBlocks(xmp=read_xmp(file.read(MAX_XMP_BYTES + 1)))
    else:
        if head.startswith(PNG_SIGNATURE):  # some programs write metadata behind the pixels
            file = io.BytesIO(_without_png_pixels(file.read(max_file_bytes)))
        _, opened, file = _open_picture(file, head, max_pixels, max_file_bytes)
        blocks = read_blocks(opened, file)
    return {"captions": find_captions(blocks, languages), "keywords": find_keywords(blocks)}


def _without_png_pixels(encoded: bytes) -> bytes:
    """Return a PNG without its pixels, up to where it ends or was cut off."""
    kept = [
        encoded[start:end]
        for name, start, end in png_chunks(encoded)
        if name not in (b"IDAT", b"fdAT", b"IEND") and end <= len(encoded)
    ]
    return b"".join([encoded[:8], *kept, PNG_END])


def _read_head(file: BinaryIO) -> bytes:
    head = file.read(HEAD_BYTES)
    file.seek(0)
    return head


def _open_picture(
    file: BinaryIO, head: bytes, max_pixels: int, max_file_bytes: int
) -> tuple[PictureForm, Any, BinaryIO]:
    """Return a picture's form, what has its metadata, and the file, in memory where it had to be read whole."""
    extra = extra_kind(head)
    if extra == HEIC.name:
        import pillow_heif

        encoded = file.read(max_file_bytes)
        images = pillow_heif.open_heif(encoded)
        primary = images[images.primary_index]
        return PictureForm("HEIC", primary.size, primary.mode), primary, io.BytesIO(encoded)
    if extra == JPEG_XL.name:
        from embedder.media.extra_formats.jpeg_xl import declared_size, open_metadata

        encoded = file.read(max_file_bytes)
        return PictureForm("JXL", declared_size(encoded) or (0, 0)), open_metadata(encoded), io.BytesIO(encoded)
    if extra is not None:
        return PictureForm("RAW", (0, 0)), None, file
    Image.MAX_IMAGE_PIXELS = max_pixels * MAX_DRAFT_REDUCTION
    try:
        image: Image.Image = Image.open(file, formats=FORMATS)
    except UnidentifiedImageError:  # of a JPEG with metadata that Pillow can't read, all bytes are needed
        file.seek(0)
        encoded = file.read(max_file_bytes)
        image, file = open_file(encoded), io.BytesIO(encoded)
    note_form(image)
    turn = read_blocks(image, file).exif.get(ORIENTATION_TAG, 1)  # Pillow would decode a PNG to look behind its pixels
    return form_of(image, turn if isinstance(turn, int) else 1), image, file
