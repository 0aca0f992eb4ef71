"""Encoded picture -> square RGB pixels, with Pillow. Runs in the decoding child, where it may fail in any way.

`S` is the side of the square that the model takes; pixels are uint8 [0, 255], RGB, C-order (S, S, 3).
"""

import io
import math
import warnings

from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

from embedder.media.errors import DecodeError
from embedder.media.resize import (
    DRAFT_SCALES,
    ResizeSpec,
    Size,
    fitting_scale,
    kept_box,
    long_cut,
    needed_scale,
    scaled_size,
)

PLUGINS = (
    JpegImagePlugin,
    PngImagePlugin,
    WebPImagePlugin,
    GifImagePlugin,
    BmpImagePlugin,
    TiffImagePlugin,
    AvifImagePlugin,
)
"""Imported here, so that the first picture doesn't wait for Pillow to import the plugins of every format it knows."""
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")  # "JPEG" covers MPO, its multi-picture form
MAX_DRAFT_REDUCTION = max(DRAFT_SCALES) ** 2  # pixels of a JPEG for each one of it decoded at 1/8 scale
MAX_PIXELS_PER_BYTE = 512  # of a JPEG: its blocks of 8 x 8 pixels take a bit each, or more
# Other formats are decoded whole: a picture of up to twice `max_pixels` is, and halved, so that only its bare pixels
# are large (4 bytes each, 8 where it is transparent).
WHOLE_FACTOR = 2

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
"""EXIF orientation -> what puts the picture upright (Source: EXIF 2.32, tag 0x0112)."""


def prepare_pillow() -> None:
    """Set Pillow up for a process that does nothing but decode."""
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # several decoders share the machine
    warnings.simplefilter("ignore")  # about metadata and sizes; the sizes are checked here


def decode_picture(encoded: bytes, fit: ResizeSpec, max_pixels: int) -> bytes:
    """Decode, put upright, flatten on white and fit.

    Args:
        encoded: the whole file.
        fit: how the picture becomes a square.
        max_pixels: pixels that are kept: a JPEG of more is decoded at reduced scale, another picture of up to twice
            as many is halved once it is decoded. Sizes are looked at before anything is decoded.

    Returns:
        S * S * 3 bytes.

    Raises:
        DecodeError: empty, of no known format, or too large.
        Exception: anything else that Pillow raises for a broken file; it has no root class of its own.
    """
    picture = _open(encoded, max_pixels)
    if isinstance(picture, JpegImagePlugin.JpegImageFile):
        check_plausible(picture.size, len(encoded), max_pixels)
        scale = max(needed_scale(picture.size, max_pixels), fitting_scale(picture.size, fit))
        if scale > 1:
            picture.draft(None, (max(1, picture.width // scale), max(1, picture.height // scale)))
        check_pixels(picture.size, max_pixels)
    else:
        check_pixels(picture.size, WHOLE_FACTOR * max_pixels)
    picture.load()
    orientation = _orientation(picture)
    picture = to_rgb(picture)
    if picture.width * picture.height > max_pixels:
        picture = picture.reduce(WHOLE_FACTOR)
    return fit_picture(upright(picture, orientation), fit)


def _open(encoded: bytes, max_pixels: int) -> Image.Image:
    """Read the header. Pillow's own check refuses what is twice too large before it makes room for a canvas."""
    if not encoded:
        raise DecodeError("EmptyFile", "the file is empty")
    reducible = encoded.startswith(b"\xff\xd8")
    Image.MAX_IMAGE_PIXELS = max_pixels * MAX_DRAFT_REDUCTION if reducible else max_pixels
    try:
        return Image.open(io.BytesIO(encoded), formats=FORMATS)
    except UnidentifiedImageError:
        known = ", ".join(FORMATS)
        raise DecodeError("UnidentifiedImageError", f"no readable header of any known format ({known})") from None
    except Image.DecompressionBombError as error:
        raise DecodeError("TooManyPixels", str(error)) from None


def check_pixels(size: tuple[int, int], max_pixels: int) -> None:
    """Raise DecodeError when a picture or frame of this width and height is too large to decode."""
    width, height = size
    if width * height > max_pixels:
        raise DecodeError(
            "TooManyPixels", f"{width} x {height} are {width * height} pixels; at most {max_pixels} are decoded"
        )


def check_plausible(size: tuple[int, int], num_bytes: int, max_pixels: int) -> None:
    """Raise DecodeError when a large JPEG is too short for its size: the decoder would make up what is not there."""
    width, height = size
    if width * height > max(max_pixels, num_bytes * MAX_PIXELS_PER_BYTE):
        raise DecodeError(
            "TooManyPixels",
            f"{width} x {height} pixels can't be in {num_bytes} bytes; the file is cut off, or made to fill the memory",
        )


def _orientation(picture: Image.Image) -> int:
    try:
        value = picture.getexif().get(ORIENTATION_TAG, 1)
    except Exception:  # noqa: BLE001 - a broken tag raises anything, and must not cost a good picture
        return 1
    return value if isinstance(value, int) else 1


def upright(picture: Image.Image, orientation: int) -> Image.Image:
    """Turn or mirror a picture as its EXIF orientation says; unknown values leave it as it is."""
    method = UPRIGHT.get(orientation)
    return picture if method is None else picture.transpose(method)


def to_rgb(picture: Image.Image) -> Image.Image:
    """Bring a loaded picture of any mode to RGB, or to L when it is grey: transparency on white, depths to 8 bits."""
    if picture.mode.startswith(("I", "F")):
        return _to_8_bits(picture)
    if picture.has_transparency_data:
        return _on_white(picture)
    if picture.mode in ("RGB", "L"):
        return picture
    return picture.convert("L" if picture.mode == "1" else "RGB")


def _on_white(picture: Image.Image) -> Image.Image:
    if picture.mode == "La":  # premultiplied grey has one conversion only
        picture = picture.convert("LA")
    rgba = picture if picture.mode == "RGBA" else picture.convert("RGBA")
    white = Image.new("RGB", rgba.size, "white")
    white.paste(rgba, mask=rgba)
    return white


def _to_8_bits(picture: Image.Image) -> Image.Image:
    """Scale 16-bit, 32-bit and float greys to 8 bits; Pillow's own conversion would clip them to white.

    16-bit modes span 0..65535. Integers and floats of 32 bits don't tell their range: it is taken to be the least of
    0..1 (floats), 0..255, 0..65535 that holds all values, else what the values themselves span.
    """
    is_float, is_16_bit = picture.mode == "F", picture.mode.startswith("I;16")
    if is_16_bit:
        low, high = 0.0, 65535.0
    else:
        low, high = _assumed_range(picture, is_float)
    wide = picture if is_float else picture.convert("I")
    factor = 255.0 / ((high - low) or 1.0)
    # Both conversions cut decimals off, so 0.5 is added; floats get there through a 32-bit float image.
    return wide.point(lambda value: value * factor + (0.5 - low * factor)).convert("L")


def _assumed_range(picture: Image.Image, is_float: bool) -> tuple[float, float]:
    extrema = picture.getextrema()
    low, high = float(extrema[0]), float(extrema[1])  # type: ignore[arg-type]  # one band: two numbers
    if not (math.isfinite(low) and math.isfinite(high)):
        raise DecodeError("UnsupportedPixels", "the picture holds infinite or undefined values")
    if low >= 0:
        for top in (1.0, 255.0, 65535.0) if is_float else (255.0, 65535.0):
            if high <= top:
                return 0.0, top
    return low, high


def fit_picture(picture: Image.Image, fit: ResizeSpec) -> bytes:
    """Resize an RGB or L picture and crop or pad it to the square; S * S * 3 bytes.

    The values are those of transformers' PIL or torchvision image processors, as the fit's resampler says.
    """
    if cut := long_cut(picture.size, fit):
        picture = picture.crop(cut)
    scaled = _scaled(picture, scaled_size(picture.size, fit), fit)
    if fit.resize == "pad":
        scaled = _padded(scaled, fit.image_size)
    return (scaled if scaled.mode == "RGB" else scaled.convert("RGB")).tobytes()


def _scaled(picture: Image.Image, size: Size, fit: ResizeSpec) -> Image.Image:
    """Resize, and keep what the fit keeps."""
    box = kept_box(size, fit)
    if fit.resampler == "torchvision":
        from embedder.media.resample import resample

        return resample(picture, size, box, fit.interpolation)
    gap = 2.0 if fit.reduced_decode else None
    scaled = picture.resize(size, Image.Resampling[fit.interpolation.upper()], reducing_gap=gap)
    return scaled if box == (0, 0, *size) else scaled.crop(box)


def _padded(picture: Image.Image, side: int) -> Image.Image:
    square = Image.new(picture.mode, (side, side), "white")
    square.paste(picture, ((side - picture.width) // 2, (side - picture.height) // 2))
    return square
