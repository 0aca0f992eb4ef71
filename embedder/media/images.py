"""Decodes an image to RGB pixels of the model's size. Runs in the sandbox process, where it may fail.

Pillow reads what it can; most JPEGs are decoded without it, straight into an array (`embedder.media.jpeg`). Pixels are
uint8 [0, 255], RGB, C-order (H, W, 3); for most models a square of side `S`.
"""

import io
import sys
import warnings
from collections.abc import Collection
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from PIL import AvifImagePlugin, Image, JpegImagePlugin, PngImagePlugin, UnidentifiedImageError

from embedder.media.colour import changes_colours, may_follow_resize, note_colour, profile_of, to_rgb, to_srgb
from embedder.media.colour_tags import without_png_profile
from embedder.media.formats import IMAGE_FORMATS
from embedder.media.jpeg import decode_pixels
from embedder.media.loaded_image import LoadedImage, PictureForm
from embedder.media.media_errors import DecodeError
from embedder.media.metadata_blocks import UNREADABLE, check_exif, without_jpeg_metadata
from embedder.media.resize import (
    DRAFT_SCALES,
    PADDING_LEVELS,
    ResizeSpec,
    Size,
    SizedPixels,
    fitting_scale,
    kept_box,
    long_cut,
    needed_scale,
    scaled_size,
)
from embedder.media.sniff import HEAD_BYTES, UNKNOWN, extra_kind, jpeg_start, other_kind, unreadable_kind

if TYPE_CHECKING:
    from embedder.media.arrays import Pixels

FORMATS = tuple(each.name.upper() for each in IMAGE_FORMATS)
MAX_DRAFT_REDUCTION = max(DRAFT_SCALES) ** 2  # pixels of a JPEG for each one of it decoded at 1/8 scale
MAX_PIXELS_PER_BYTE = 512  # of a JPEG: its blocks of 8 x 8 pixels take a bit each, or more
# Other formats are decoded whole: an image of up to twice `max_pixels` is decoded and halved, so that only its bare
# pixels are large (4 bytes each, 8 if it is transparent).
WHOLE_FACTOR = 2
MAX_TEXT_BYTES = 16 << 20  # of one unpacked text or colour profile of a PNG; a longer one is ignored

UNIDENTIFIED = "UnidentifiedImageError"

STORED = "stored_form"
"""Key of `Image.info` for the `StoredForm` of an opened image."""


class StoredForm(NamedTuple):
    """Size and mode of an image before it was reduced or turned, and the orientation that only a TIFF's tags have."""

    size: Size
    mode: str
    orientation: int | None


ORIENTATION_TAG = 0x0112
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Maps an EXIF orientation to the transposition that puts the image upright (Source: EXIF 2.32, tag 0x0112)."""


def prepare_pillow() -> None:
    """Configure Pillow for a process that only decodes."""
    for each in IMAGE_FORMATS:  # else the first image loads all of Pillow's plugins
        import_module(f"PIL.{each.plugin}")
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # several decoders share the machine
    PngImagePlugin.MAX_TEXT_CHUNK, PngImagePlugin.MAX_TEXT_MEMORY = MAX_TEXT_BYTES, sys.maxsize  # memory is bounded
    warnings.simplefilter("ignore")  # about metadata and sizes, which are checked here


def decode_image(
    encoded: bytes, resize: ResizeSpec, max_pixels: int, medium_columns: Collection[str] = ()
) -> SizedPixels:
    """Decode an image, put it upright, flatten it on white and resize it; of an animated one, the first frame.

    `medium_columns` are the columns of the medium whose values are read with it.

    A JPEG larger than `max_pixels` is decoded at reduced scale; another image of up to twice as many is decoded and
    halved. Sizes are checked before anything is decoded. Raises a DecodeError, or anything else that Pillow raises for
    a broken file; it has no root class of its own.
    """
    kind = extra_kind(encoded)
    if kind is None:
        loaded = load_image(encoded, resize, max_pixels)
    else:  # their packages cost up to half a second and are imported with the first such file
        from embedder.media.extra_formats.extra_decoders import load_extra

        loaded = load_extra(kind, encoded, resize, max_pixels)
    sized = finish_image(loaded, resize, max_pixels)
    if not medium_columns:
        return sized
    from embedder.media.medium_values import picture_values

    opened = loaded.source
    form = loaded.form or form_of(opened, loaded.orientation)
    return sized._replace(medium=picture_values(form, opened, io.BytesIO(encoded), medium_columns, sized))


def load_image(encoded: bytes, resize: ResizeSpec, max_pixels: int) -> LoadedImage:
    """Decode an image of a format that Pillow reads; a JPEG at reduced scale if that is enough.

    The image may have twice `max_pixels`. Raises like `decode_image`; DecodeError also if too much of the image is
    missing.
    """
    encoded = encoded[jpeg_start(encoded) or 0 :]
    try:
        opened = _open(encoded, resize, max_pixels)
        if (loaded := _load_array(opened, encoded, resize)) is not None:
            return loaded
        opened.load()
        return LoadedImage(opened, orientation_of(opened))
    except MemoryError:
        raise
    except Exception as error:
        if isinstance(error, DecodeError) and error.error_type != UNIDENTIFIED:
            raise
        image, note = _load_damaged(encoded, resize, max_pixels, error)
    return LoadedImage(image, orientation_of(image), note)


def _load_array(opened: Image.Image, encoded: bytes, resize: ResizeSpec) -> LoadedImage | None:
    """Decode a JPEG at full size into an array, if that gives Pillow's pixels and its colours may wait; else None."""
    if not isinstance(opened, JpegImagePlugin.JpegImageFile) or opened.decoderconfig:
        return None
    profile = _profile(opened, resize)
    if profile is not None and not may_follow_resize(opened, profile):
        return None
    pixels_HWC = decode_pixels(encoded, opened.mode)
    if pixels_HWC is None:
        return None
    return LoadedImage(pixels_HWC, orientation_of(opened), late_profile=profile, opened=opened)


def _load_damaged(
    encoded: bytes, resize: ResizeSpec, max_pixels: int, refusal: Exception
) -> tuple[Image.Image, str | None]:
    """Decode what viewers would show; re-raise the strict reader's refusal if that fails, too."""
    from embedder.media.damaged import salvage

    try:
        salvaged = salvage(
            encoded, lambda each: _load(each, resize, max_pixels), lambda each: _open(each, resize, max_pixels)
        )
    except (MemoryError, DecodeError):
        raise
    except Exception:  # noqa: BLE001 - as it is broken in another way, too
        raise refusal from None
    if salvaged is None:
        raise refusal
    return salvaged


def _load(encoded: bytes, resize: ResizeSpec, max_pixels: int) -> Image.Image:
    image = _open(encoded, resize, max_pixels)
    image.load()
    return image


def _open(encoded: bytes, resize: ResizeSpec, max_pixels: int) -> Image.Image:
    image = open_image(encoded, max_pixels)
    if isinstance(image, JpegImagePlugin.JpegImageFile):
        check_plausible(image.size, len(encoded), max_pixels)
        scale = max(needed_scale(image.size, max_pixels), fitting_scale(image.size, resize))
        if scale > 1:
            image.draft(None, (max(1, image.width // scale), max(1, image.height // scale)))
        check_pixels(image.size, max_pixels)
    else:
        check_pixels(image.size, WHOLE_FACTOR * max_pixels)
    return image


def finish_image(loaded: LoadedImage, resize: ResizeSpec, max_pixels: int) -> SizedPixels:
    """Convert a decoded image to 8-bit sRGB, put it upright and resize it."""
    image, orientation, note, late_profile = loaded[:4]
    if isinstance(image, Image.Image):
        profile = _profile(image, resize)
        if profile is not None and may_follow_resize(image, profile):
            late_profile = profile
        else:
            image = to_rgb(image, resize.colour)
        if image.width * image.height > max_pixels:
            image = image.reduce(WHOLE_FACTOR)
        sized = resize_image(upright(image, orientation), resize)
    else:
        from embedder.media.arrays import upright_array

        sized = resize_image(upright_array(image, orientation), resize)
    if changes_colours(late_profile):
        sized = sized._replace(data=to_srgb(Image.frombytes("RGB", sized.size, sized.data), late_profile).tobytes())
    return sized._replace(note=note)


def _profile(image: Image.Image, resize: ResizeSpec) -> bytes | None:
    return profile_of(image) if resize.colour == "srgb" else None


def open_image(encoded: bytes, max_pixels: int) -> Image.Image:
    """Read the header; a DecodeError if the file is empty, of no known format, or too large.

    Pillow's own check refuses images twice too large before it allocates a canvas.
    """
    if not encoded:
        raise DecodeError("EmptyFile", "the file is empty")
    reducible = encoded.startswith(b"\xff\xd8")
    Image.MAX_IMAGE_PIXELS = max_pixels * MAX_DRAFT_REDUCTION if reducible else max_pixels
    try:
        image = open_file(encoded)
        note_colour(image, encoded)
        note_form(image)
        return image
    except UnidentifiedImageError:
        raise DecodeError(UNIDENTIFIED, _no_header(encoded[:HEAD_BYTES])) from None
    except Image.DecompressionBombError as error:
        raise DecodeError("TooManyPixels", f"{error} (`max_pixels`)") from None


def open_file(encoded: bytes) -> Image.Image:
    """Open an image; a PNG without its profile if that is too large, a JPEG without metadata that Pillow can't read."""
    try:
        return Image.open(io.BytesIO(encoded), formats=FORMATS)
    except UnidentifiedImageError:
        if (bare := without_jpeg_metadata(encoded)) == encoded:
            raise
        image = Image.open(io.BytesIO(bare), formats=FORMATS)
        image.info[UNREADABLE] = "Pillow can't open the picture with it"
        return image
    except ValueError:
        if (without := without_png_profile(encoded)) == encoded:
            raise
        return Image.open(io.BytesIO(without), formats=FORMATS)


def _no_header(head: bytes) -> str:
    known = ", ".join(FORMATS)
    kind = unreadable_kind(head) or other_kind(head)
    found = "" if kind == UNKNOWN else f" ({kind})"
    return f"no readable header of any known format{found}; known are {known}"


def check_pixels(size: tuple[int, int], max_pixels: int) -> None:
    """Raise a DecodeError if an image or frame of this width and height is too large to decode."""
    width, height = size
    if width * height > max_pixels:
        raise DecodeError(
            "TooManyPixels",
            f"{width} x {height} are {width * height} pixels; at most {max_pixels} are decoded (`max_pixels`)",
        )


def check_plausible(size: tuple[int, int], num_bytes: int, max_pixels: int) -> None:
    """Raise a DecodeError if a large JPEG is too short for its size: the decoder would invent missing pixels."""
    width, height = size
    if width * height > max(max_pixels, num_bytes * MAX_PIXELS_PER_BYTE):
        raise DecodeError(
            "TooManyPixels",
            f"{width} x {height} pixels can't be in {num_bytes} bytes; the file is cut off, or made to fill the memory",
        )


def orientation_of(image: Image.Image) -> int:
    """Return an image's EXIF orientation, 1 if there is none or it is unreadable."""
    try:
        check_exif(image.info)
        value = image.getexif().get(ORIENTATION_TAG, 1)
    except Exception:  # noqa: BLE001 - a broken tag raises anything, and must not cost a good image
        return 1
    return value if isinstance(value, int) else 1


def note_form(image: Image.Image) -> None:
    """Keep the form of an image that was opened just now: loading reduces a JPEG and turns a TIFF."""
    tags = getattr(image, "tag_v2", {})
    image.info[STORED] = StoredForm(image.size, image.mode, tags.get(ORIENTATION_TAG))


def form_of(opened: Image.Image, orientation: int) -> PictureForm:
    """Return the form of an image that `open_image` opened, whose pixels this orientation puts upright."""
    stored = opened.info.get(STORED) or StoredForm(opened.size, opened.mode, None)
    applied = stored.orientation if stored.orientation in UPRIGHT else orientation if orientation in UPRIGHT else 1
    width, height = stored.size  # of a TIFF, already upright
    is_turned = applied > 4 and stored.orientation is None
    name = "JPEG" if opened.format == "MPO" else opened.format or ""
    return PictureForm(name, (height, width) if is_turned else (width, height), stored.mode, applied)


def upright(image: Image.Image, orientation: int) -> Image.Image:
    """Apply an EXIF orientation; unknown values change nothing."""
    method = UPRIGHT.get(orientation)
    return image if method is None else image.transpose(method)


def resize_image(image: "Image.Image | Pixels", resize: ResizeSpec, size: Size | None = None) -> SizedPixels:
    """Resize an RGB or L image, and crop or pad it to the square if the model takes one.

    The values are those of transformers' PIL or torchvision image processors, depending on the rule's resampler. `size`
    is the width and height to resize to; None means those of the rule.
    """
    if resize.resampler == "torchvision":
        from embedder.media.resample import resize_as_torchvision

        return resize_as_torchvision(image, resize, size)
    if not isinstance(image, Image.Image):
        from embedder.media.arrays import to_pillow

        image = to_pillow(image)
    if cut := long_cut(image.size, resize):
        image = image.crop(cut)
    scaled = _scale(image, size or scaled_size(image.size, resize), resize)
    if resize.mode in PADDING_LEVELS:
        scaled = _pad(scaled, resize.image_size, PADDING_LEVELS[resize.mode])
    return SizedPixels(scaled.size, (scaled if scaled.mode == "RGB" else scaled.convert("RGB")).tobytes())


def _scale(image: Image.Image, size: Size, resize: ResizeSpec) -> Image.Image:
    box = kept_box(size, resize)
    gap = 2.0 if resize.reduced_decode else None
    scaled = image.resize(size, Image.Resampling[resize.interpolation.upper()], reducing_gap=gap)
    return scaled if box == (0, 0, *size) else scaled.crop(box)


def _pad(image: Image.Image, side: int, level: int) -> Image.Image:
    square = Image.new(image.mode, (side, side), (level,) * len(image.getbands()))
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square
