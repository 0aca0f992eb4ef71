"""Converts a decoded picture or frame of any mode to 8-bit sRGB on white, using all its file says about colour.

`raw` reads numbers as sRGB whatever the file says. `srgb` uses, in this order: a PNG's `cICP`, an ICC profile, the
codes of AVIF and HEIC, a PNG's `sRGB`, its `gAMA` and `cHRM`, a TIFF's white point and primaries, and an Exif that
declares Adobe RGB. Each becomes an ICC profile, which littlecms applies: relative colorimetric, with black point
compensation. Broken profiles, and those for other channels than the picture's, are ignored. Of pictures with gain maps,
the base picture is used.
"""

import io
import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from PIL import Image

from embedder.media.colour_profiles import (
    BT709,
    HLG,
    PQ,
    Cicp,
    Primaries,
    adobe_rgb_profile,
    cicp_profile,
    gamma_profile,
    primaries_profile,
    table_profile,
)
from embedder.media.colour_tags import (
    MAX_PROFILE_BYTES,
    bmp_profile,
    cicp_of_profile,
    heif_cicp,
    png_cicp,
    says_adobe_rgb,
)
from embedder.media.media_errors import DecodeError
from embedder.media.resize import Colour

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.ImageCms import ImageCmsTransform

CICP = "cicp"
"""Key of `Image.info` for the codes of primaries and transfer, next to Pillow's `icc_profile`, `gamma`, ..."""

RGB, GREY, CMYK = b"RGB ", b"GRAY", b"CMYK"
"""Colour spaces whose profiles are applied (Source: ICC.1:2022, table 19)."""
CLASSES = (b"mntr", b"scnr", b"prtr", b"spac")
GREY_MODES = frozenset({"1", "L", "LA", "La", "I", "F"})
NEGLIGIBLE = 1
"""A transform that changes colours by no more than this many levels counts as none."""
NEIGHBOURS_DIFFER, MAX_AVERAGE_OFF = 40, 3.5
"""Levels by which neighbours at an edge differ, and by which their averages may be off.

Display P3 and Adobe RGB are at 2.7, and photographs in them are off by 0.3 to 0.5 levels on average; ProPhoto's wide
space is at 4.3, linear ones at 4.6.
"""
DARKEST_WHITE = 128
"""A profile that turns white darker than this is broken."""

WHITE_IS_ZERO = 0
PHOTOMETRIC, TRANSFER_FUNCTION, WHITE_POINT, PRIMARY_CHROMATICITIES = 262, 301, 318, 319


def to_rgb(image: Image.Image, colour: Colour = "srgb") -> Image.Image:
    """Convert a loaded image of any mode to RGB, or to L if it is grey: on white, with 8 bits.

    `image.info` holds what its file says about colour. Raises a DecodeError for infinite or undefined values.
    """
    if colour == "srgb":
        image = to_srgb(upright_grey(image), profile_of(image))
    if image.mode.startswith(("I", "F")):
        return _to_8_bits(image)
    if image.has_transparency_data:
        return _on_white(image)
    if image.mode in ("RGB", "L"):
        return image
    return image.convert("L" if image.mode == "1" else "RGB")


def note_colour(image: Image.Image, encoded: bytes) -> None:
    """Add to an opened image's `info` what its file says about colour and Pillow leaves out."""
    if image.format == "PNG":
        image.info[CICP] = png_cicp(encoded)
    elif image.format == "AVIF":
        image.info[CICP] = heif_cicp(encoded)
    elif image.format == "BMP":
        image.info["icc_profile"] = bmp_profile(encoded)


def profile_of(image: Image.Image) -> bytes | None:
    """Return the ICC profile for a loaded image's numbers; None if they are sRGB or its `info` says nothing."""
    info, is_grey = image.info, image.mode in GREY_MODES or image.mode.startswith("I;16")
    codes = _codes(image)
    if codes is not None:
        return cicp_profile(codes, is_grey=is_grey)
    profile = info.get("icc_profile")
    if profile and isinstance(profile, bytes):
        return profile
    if "srgb" in info:
        return None
    return _gamma_profile(info, is_grey) if "gamma" in info else _tagged_profile(image, is_grey)


def _codes(image: Image.Image) -> Cicp | None:
    """Return the codes that apply: a PNG's, another file's if it has no profile, else those of an HDR profile."""
    codes, profile = image.info.get(CICP), image.info.get("icc_profile")
    if isinstance(codes, tuple) and (image.format == "PNG" or not profile):
        return codes
    if not isinstance(profile, bytes) or len(profile) > MAX_PROFILE_BYTES:
        return None
    codes = cicp_of_profile(profile)
    return codes if codes is not None and codes[1] in (PQ, HLG) else None  # the profile's own curves are for 10,000 nit


def _tagged_profile(image: Image.Image, is_grey: bool) -> bytes | None:
    tags, exif = getattr(image, "tag_v2", None), image.info.get("exif")
    if tags is not None and (WHITE_POINT in tags or TRANSFER_FUNCTION in tags):
        return _tiff_profile(tags, is_grey)
    is_adobe = not is_grey and isinstance(exif, bytes) and says_adobe_rgb(exif)
    return adobe_rgb_profile() if is_adobe else None


def _gamma_profile(info: dict[Any, Any], is_grey: bool) -> bytes | None:
    """Return the profile for a PNG's `gAMA` and `cHRM`; `cHRM` without a gamma is ignored, as in browsers."""
    gamma, points = info["gamma"], info.get("chromaticity")
    if not isinstance(gamma, float) or gamma <= 0:
        return None
    if not isinstance(points, tuple) or len(points) != 8:
        return gamma_profile(1 / gamma, is_grey=is_grey)
    white, red, green, blue = (tuple(points[start : start + 2]) for start in (0, 2, 4, 6))
    return gamma_profile(1 / gamma, (red, green, blue, white), is_grey=is_grey)


def _tiff_profile(tags: Any, is_grey: bool) -> bytes | None:
    """Return the profile for a TIFF's colorimetry (TIFF 6.0, section 20); the default curve is that of sRGB."""
    try:
        points = [float(value) for value in (*tags.get(PRIMARY_CHROMATICITIES, ()), *tags.get(WHITE_POINT, ()))]
        levels = tags.get(TRANSFER_FUNCTION, ())
        num_curves = 3 if len(levels) in (3 << 8, 3 << 16) else 1
        size = len(levels) // num_curves
        curves = [[level / 65535 for level in levels[start : start + size]] for start in range(0, len(levels), size)]
    except Exception:  # noqa: BLE001 - broken tags hold anything, and must not cost a good image
        return None
    primaries: Primaries | None = None
    if len(points) == 8:
        red, green, blue, white = ((points[start], points[start + 1]) for start in (0, 2, 4, 6))
        primaries = (red, green, blue, white)
    if size in (1 << 8, 1 << 16):
        step = max(1, size >> 12)  # a curve of 4096 points is as good
        short = [[*curve[::step], curve[-1]] if step > 1 else curve for curve in curves]
        return table_profile(short, primaries or BT709, is_grey=is_grey)
    return primaries_profile(primaries) if primaries and not is_grey else None


def upright_grey(image: Image.Image) -> Image.Image:
    """Invert 16-bit greys of a TIFF whose white is zero; Pillow does it only for up to 8 bits."""
    tags = getattr(image, "tag_v2", None)
    if tags is None or not image.mode.startswith("I;16") or tags.get(PHOTOMETRIC) != WHITE_IS_ZERO:
        return image
    turned = image.point(lambda value: value * -1 + 65535)
    turned.info = image.info
    return turned


def to_srgb(image: Image.Image, profile: bytes | None) -> Image.Image:
    """Convert an image to sRGB (mode RGB, RGBA, L or LA); return it unchanged if no colour changes.

    Profile None means sRGB; a profile that is broken, too large, or for other channels is ignored. Raises a DecodeError
    for infinite or undefined values.
    """
    space = _space(profile)
    if profile is None or space is None:
        return image
    prepared = _prepare(image, space)
    if prepared is None:
        return image
    if space == GREY:
        return _convert_greys(prepared, profile)
    transform = _transform(profile, prepared.mode)
    if transform is None:
        return image
    converted = transform.apply(prepared)
    converted.info.pop("transparency", None)
    return converted


def changes_colours(profile: bytes | None) -> bool:
    """Return whether an ICC profile changes an RGB image's colours; most are sRGB and don't.

    Takes a microsecond for a profile that was seen before.
    """
    return profile is not None and _space(profile) == RGB and _transform(profile, "RGB") is not None


def may_follow_resize(image: Image.Image, profile: bytes) -> bool:
    """Return whether an image's profile may be applied after its resize, at a fraction of the cost.

    A resize averages neighbours. The order doesn't matter if averages of colours convert to averages of the converted
    colours: so it is with curves near sRGB's (Display P3, Adobe RGB), but not with linear ones or PQ.
    """
    return image.mode == "RGB" and not image.has_transparency_data and _keeps_averages(profile)


@lru_cache(maxsize=16)
def _keeps_averages(profile: bytes) -> bool:
    if _space(profile) != RGB:
        return True  # it is ignored
    transform = _transform(profile, "RGB")
    if transform is None:
        return True
    import numpy as np

    def convert(pixels: "NDArray[np.float64]") -> "NDArray[np.float64]":
        image = Image.frombytes("RGB", (len(pixels), 1), np.rint(pixels).astype(np.uint8).tobytes())
        levels: NDArray[np.float64] = np.asarray(transform.apply(image))[0].astype(np.float64)
        return levels

    black, white = convert(np.array([[0.0] * 3, [255.0] * 3]))
    if black.max() > NEGLIGIBLE or white.min() < 255 - NEGLIGIBLE:
        return False  # the padding would change, too
    rng = np.random.default_rng(0)
    vivid = rng.uniform(0, 255, (8192, 3))
    one = (vivid + vivid.mean(1, keepdims=True)) / 2  # as colourful as photographs
    other = (one + rng.normal(0, NEIGHBOURS_DIFFER, (len(one), 1))).clip(0, 255)
    off = convert((one + other) / 2) - (convert(one) + convert(other)) / 2
    return bool(np.sqrt((off**2).mean()) <= MAX_AVERAGE_OFF)


def _space(profile: bytes | None) -> bytes | None:
    if not isinstance(profile, bytes) or not 132 <= len(profile) <= MAX_PROFILE_BYTES or profile[36:40] != b"acsp":
        return None
    space = profile[16:20]
    return space if space in (RGB, GREY, CMYK) and profile[12:16] in CLASSES else None


def _prepare(image: Image.Image, space: bytes) -> Image.Image | None:
    """Convert an image to a mode that profiles of this space accept; None if its channels don't match."""
    mode = image.mode
    if space == CMYK:
        return image if mode == "CMYK" else None
    if space == GREY:
        if mode.startswith(("I", "F")):
            return image if mode == "I;16" else _to_8_bits(image)
        if mode in ("L", "LA", "La"):
            return image.convert("LA") if mode == "La" or image.has_transparency_data else image
        return None
    if mode in GREY_MODES or mode.startswith("I;16") or mode in ("CMYK", "LAB", "HSV"):
        return None
    wanted = "RGBA" if image.has_transparency_data else "RGB"
    return image if mode == wanted else image.convert(wanted)


def _convert_greys(image: Image.Image, profile: bytes) -> Image.Image:
    """Convert greys to sRGB, 16-bit ones at full depth because linear ones keep their shadows in few levels."""
    table = _grey_table(profile)
    if table is None:
        return image
    if image.mode == "I;16":
        return _build(profile, "I;16", "RGB").apply(image).getchannel("G")
    if image.mode == "L":
        return image.point(table)
    grey, alpha = image.split()
    return Image.merge("LA", (grey.point(table), alpha))


@lru_cache(maxsize=16)
def _transform(profile: bytes, mode: str) -> "ImageCmsTransform | None":
    """Return the transform from a profile to sRGB; None if it changes nothing or the profile is broken."""
    outcome = "RGBA" if mode == "RGBA" else "RGB"
    try:
        transform = _build(profile, mode, outcome)
        before = _probe(mode)
        after = transform.apply(before).convert("RGB")
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - a broken profile raises anything, and must not cost a good image
        return None
    if mode == "CMYK":  # CMYK isn't like sRGB even without its profile
        return transform if _is_light(after.crop((0, 0, 1, 1))) else None
    is_same = _difference(before.convert("RGB"), after) <= NEGLIGIBLE
    return None if is_same or not _is_light(after.crop((after.width - 1, 0, after.width, 1))) else transform


@lru_cache(maxsize=16)
def _grey_table(profile: bytes) -> tuple[int, ...] | None:
    """Return the sRGB level for each of 256 grey levels; None if they are equal or the profile is broken."""
    ramp = Image.frombytes("L", (256, 1), bytes(range(256)))
    try:
        toned = _build(profile, "L", "RGB").apply(ramp).getchannel("G").tobytes()
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - as above
        return None
    is_same = all(abs(level - number) <= NEGLIGIBLE for number, level in enumerate(toned))
    return None if is_same or toned[-1] < DARKEST_WHITE else tuple(toned)


def _build(profile: bytes, mode: str, outcome: str) -> "ImageCmsTransform":
    from PIL import ImageCms  # takes 20 ms, and only pictures with a profile need it

    return ImageCms.buildTransform(
        ImageCms.ImageCmsProfile(io.BytesIO(profile)),
        ImageCms.createProfile("sRGB"),
        mode,
        outcome,
        ImageCms.Intent.RELATIVE_COLORIMETRIC,
        ImageCms.Flags.BLACKPOINTCOMPENSATION,
    )


def _probe(mode: str) -> Image.Image:
    """Return 9 x 9 x 9 colours and then white, to see whether a transform changes any; for CMYK, only paper."""
    if mode == "CMYK":
        return Image.new("CMYK", (1, 1))
    levels = [round(number * 255 / 8) for number in range(9)]
    pixels = b"".join(bytes((red, green, blue)) for red in levels for green in levels for blue in levels)
    return Image.frombytes("RGB", (9 * 9 * 9, 1), pixels).convert(mode)


def _difference(one: Image.Image, other: Image.Image) -> int:
    from PIL import ImageChops

    return max(high for _, high in ImageChops.difference(one, other).getextrema())  # type: ignore[misc]  # three bands


def _is_light(pixel: Image.Image) -> bool:
    return pixel.convert("L").tobytes()[0] >= DARKEST_WHITE


def _on_white(image: Image.Image) -> Image.Image:
    if image.mode == "La":  # premultiplied grey has one conversion only
        image = image.convert("LA")
    rgba = image if image.mode == "RGBA" else image.convert("RGBA")
    white = Image.new("RGB", rgba.size, "white")
    white.paste(rgba, mask=rgba)
    return white


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Scale 16-bit, 32-bit and float greys to 8 bits; Pillow's own conversion would clip them to white.

    16-bit modes span 0..65535. 32-bit integers and floats don't declare their range: it is assumed to be the smallest
    of 0..1 (floats), 0..255, 0..65535 that holds all values, else the span of the values.
    """
    is_float, is_16_bit = image.mode == "F", image.mode.startswith("I;16")
    if is_16_bit:
        low, high = 0.0, 65535.0
    else:
        low, high = _assumed_range(image, is_float)
    wide = image if is_float else image.convert("I")
    factor = 255.0 / ((high - low) or 1.0)
    # Both conversions truncate decimals, so 0.5 is added; floats get there through a 32-bit float image.
    return wide.point(lambda value: value * factor + (0.5 - low * factor)).convert("L")


def _assumed_range(image: Image.Image, is_float: bool) -> tuple[float, float]:
    extrema = image.getextrema()
    low, high = float(extrema[0]), float(extrema[1])  # type: ignore[arg-type]  # one band: two numbers
    if not (math.isfinite(low) and math.isfinite(high)):
        raise DecodeError("UnsupportedPixels", "the image holds infinite or undefined values")
    if low >= 0:
        for top in (1.0, 255.0, 65535.0) if is_float else (255.0, 65535.0):
            if high <= top:
                return 0.0, top
    return low, high
