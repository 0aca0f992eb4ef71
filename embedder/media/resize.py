"""Arithmetic for resizing an image to a square of the model's size or to patches; without pixels.

Sizes are (width, height) in pixels.
"""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

if TYPE_CHECKING:
    from shards.preprocess import PreprocessConfig
    from shards.towers.tower_kinds import VisionTower

Size = tuple[int, int]
Box = tuple[int, int, int, int]
ResizeMode = Literal["squash", "crop", "pad", "pad_black", "patches", "fit"]
Interpolation = Literal["bilinear", "bicubic", "lanczos"]
Resampler = Literal["pillow", "torchvision"]
Colour = Literal["srgb", "raw"]
"""Whether numbers are read as the file says (ICC profiles, HDR, ...), or all as sRGB."""

DRAFT_SCALES = (1, 2, 4, 8)  # a JPEG may be decoded at 1/1, 1/2, 1/4 or 1/8 of its pixels along each side
REDUCED_MARGIN = 2  # a reduced JPEG keeps at least twice the target, so that the resize still filters
PADDING_LEVELS = {"pad": 255, "pad_black": 0}
"""Maps a padding mode to the level of all channels around the image."""
MAX_CROP_ASPECT = 64
"""Beyond this aspect ratio, what a crop discards is cut off before the resize."""
MAX_STRIP_ASPECT = 200
"""Longest proportions of an image that is resized to whole squares of patches."""
MAX_FAST_CROP_ASPECT = 4
"""The same limit with Pillow if speed matters more than its exact values; torchvision's cost little anyway."""


class SizedPixels(NamedTuple):
    """Pixels of an image, uint8 RGB (height, width, 3), with its width and height, and a note on what is missing.

    `medium` has the values of the medium's columns that were asked for; None means none were.
    """

    size: Size
    data: bytes | memoryview
    note: str | None = None
    medium: dict[str, Any] | None = None


@dataclass(frozen=True)
class ResizeSpec:
    """Rule for resizing images to the size that the model takes.

    Attributes:
        image_size: side of the square, in pixels.
        mode: `squash` ignores proportions; `crop` scales the shortest side and cuts out the middle; `pad` shows the
            whole image on white, `pad_black` on black; `patches` keeps proportions, makes both sides multiples of
            `patch_size`, and gives at most `max_patches` patches; `fit` shows the whole image, its longest side
            `image_size` at most, and never enlarges.
        interpolation: the filter of that name (antialiased).
        reduced_decode: JPEGs may be decoded at 1/2, 1/4 or 1/8 scale while that stays at least twice the target.
        resampler: library whose resize is matched to the bit; `torchvision` also crops as transformers does with it.
        resize_size: size that `squash` and `crop` resize to, in pixels, before the middle square of `image_size` is cut
            out; None: `image_size`.
        colour: `srgb` reads an image's numbers as its file says, `raw` as if all were sRGB.
        merge_size: side of the squares of patches that a model makes one token of; both sides are whole squares then.
        min_patches: with such squares, a smaller image is enlarged to so many patches; 0: each image fills the budget.
        clip_frames: number of frames of a clip that share what it may have, 1: each by itself; 0: a frame of a clip is
            as an image.
        clip_least, clip_most: least and most pixels of such frames.
    """

    image_size: int
    mode: ResizeMode = "squash"
    interpolation: Interpolation = "bilinear"
    reduced_decode: bool = False
    resampler: Resampler = "pillow"
    resize_size: int | None = None
    patch_size: int = 0
    max_patches: int = 0
    colour: Colour = "srgb"
    merge_size: int = 1
    min_patches: int = 0
    clip_frames: int = 0
    clip_least: int = 0
    clip_most: int = 0

    @property
    def most_patches(self) -> int:
        """The most patches of an image or frame; a strip one square high, or an enlarged one, may exceed the budget."""
        if self.clip_frames:
            least, most = (
                each // (self.clip_frames * self.patch_size**2) + 1 for each in (self.clip_least, self.clip_most)
            )
            # Frames are counted in pairs, of which an odd number may lack one.
            frame = replace(self, clip_frames=0, max_patches=2 * most, min_patches=self.min_patches and least)
            return max(replace(self, clip_frames=0).most_patches, frame.most_patches)
        if self.merge_size == 1 or not self.min_patches:
            return self.max_patches
        square = self.merge_size**2
        strip = square * (math.isqrt(MAX_STRIP_ASPECT * (self.max_patches // square)) + 1)
        fewest = -(-self.min_patches // square)
        # Both sides of an enlarged image are rounded up, which adds one square a row and a column.
        enlarged = square * (fewest + (math.isqrt(fewest) + 1) * (math.isqrt(MAX_STRIP_ASPECT) + 2) + 1)
        return max(self.max_patches, strip, enlarged)

    @classmethod
    def of(
        cls,
        preprocess: "PreprocessConfig",
        vision: "VisionTower | None" = None,
        colour: Colour = "srgb",
        frames_per_segment: int = 0,
    ) -> Self:
        """Return the rule of a model's preprocessing; `frames_per_segment` for clips, if a model takes them whole."""
        clips = preprocess.clips if frames_per_segment else None
        frames, least, most = clips.pixel_limits(frames_per_segment) if clips is not None else (0, 0, 0)
        patch_px = vision.patch_px if vision is not None else None
        return cls(
            image_size=preprocess.image_size,
            mode=preprocess.resize,
            interpolation=preprocess.interpolation,
            reduced_decode=preprocess.reduced_decode,
            resampler=preprocess.resampler,
            resize_size=preprocess.resize_size,
            patch_size=patch_px or 0,
            max_patches=vision.num_tokens - vision.num_prefix_tokens if vision is not None and patch_px else 0,
            colour=colour,
            merge_size=vision.merge_size if vision is not None else 1,
            min_patches=vision.fewest_patches if vision is not None else 0,
            clip_frames=frames,
            clip_least=least,
            clip_most=most,
        )


def max_bytes(resize: ResizeSpec) -> int:
    """Return the maximum bytes of pixels of a resized image."""
    num_pixels = resize.most_patches * resize.patch_size**2 if resize.mode == "patches" else resize.image_size**2
    return 3 * num_pixels


def scaled_size(size: Size, resize: ResizeSpec) -> Size:
    """Return the size of the whole image after the resize, before a crop or padding.

    Source: torchvision 0.29 `_compute_resized_output_size` for `crop`: the longer side is rounded down. open_clip 3.3
    `ResizeKeepRatio` for `pad_black`: a quotient of quotients, which rounds differently from `pad` in a few of 100,000.
    """
    if resize.mode == "patches" and resize.merge_size > 1:
        return whole_squares_size(size, resize) if resize.min_patches else most_squares_size(size, resize)
    if resize.mode == "patches":
        return whole_patches_size(size, resize.patch_size, resize.max_patches)
    side, shortest, longest = resize.resize_size or resize.image_size, min(size), max(size)
    if resize.mode == "squash":
        return side, side
    if resize.mode == "crop":
        width, height = (side if edge == shortest else side * edge // shortest for edge in size)
        return width, height
    if resize.mode == "pad_black":
        width, height = (max(1, round(edge / (longest / side))) for edge in size)
        return width, height
    if resize.mode == "fit":
        side = min(side, longest)
    width, height = (max(1, round(side * edge / longest)) for edge in size)
    return width, height


def whole_patches_size(size: Size, patch_size: int, max_patches: int) -> Size:
    """Return the size with whole patches along both sides, as many as allowed; the scale is at most 100.

    Source: transformers 5.23 `get_image_size_for_max_num_patches`, and timm 1.0.31 `get_image_size_for_seq`, which are
    this binary search, to the last bit.
    """

    def scale_sides(scale: float) -> Size:
        width, height = (max(patch_size, math.ceil(edge * scale / patch_size) * patch_size) for edge in size)
        return width, height

    least, most, precision = 1e-5 / 10, 100.0, 1e-5
    while most - least >= precision:
        scale = (least + most) / 2
        width, height = scale_sides(scale)
        if width // patch_size * (height // patch_size) <= max_patches:
            least = scale
        else:
            most = scale
    return scale_sides(least)


def whole_squares_size(size: Size, resize: ResizeSpec) -> Size:
    """Return the size with whole squares of patches along both sides, within the budget and no smaller than its least.

    Source: transformers 5.23 `smart_resize` of Qwen2VLImageProcessor, which refuses proportions beyond 200 to 1; those
    images are given 200 to 1.
    """
    least, most = (number * resize.patch_size**2 for number in (resize.min_patches, resize.max_patches))
    return _squares_between(_within_strip(size), resize.patch_size * resize.merge_size, least, most)


def clip_size(size: Size, resize: ResizeSpec) -> Size:
    """Return the size of a clip's frames after the resize; they have that of an image unless the model takes clips.

    Source: transformers 5.23 `smart_resize` of Qwen3VLVideoProcessor, where frames share the pixels, and those of
    `whole_squares_size` and `most_squares_size`.
    """
    if not resize.clip_frames:
        return scaled_size(size, resize)
    if not resize.min_patches:
        return most_squares_size(size, replace(resize, max_patches=resize.clip_most // resize.patch_size**2))
    (width, height), factor = _within_strip(size), resize.patch_size * resize.merge_size
    if resize.clip_frames > 1 and min(width, height) < factor:
        scale = max(factor / height, factor / width)
        width, height = int(width * scale), int(height * scale)
    return _squares_between((width, height), factor, resize.clip_least, resize.clip_most, resize.clip_frames)


def _within_strip(size: Size) -> Size:
    width, height = (min(edge, MAX_STRIP_ASPECT * min(size)) for edge in size)
    return width, height


def _squares_between(size: Size, factor: int, least: int, most: int, frames: int = 1) -> Size:
    """Return the size in whole squares of `factor` px so that frames of it have between `least` and `most` pixels."""
    width, height = size
    counted = round(frames / 2) * 2 if frames > 1 else 1
    rounded = round(width / factor) * factor, round(height / factor) * factor
    if counted * rounded[0] * rounded[1] > most:
        beta = math.sqrt((frames * height * width) / most)
        return (
            max(factor, math.floor(width / beta / factor) * factor),
            max(factor, math.floor(height / beta / factor) * factor),
        )
    if counted * rounded[0] * rounded[1] < least:
        beta = math.sqrt(least / (frames * height * width))
        return math.ceil(width * beta / factor) * factor, math.ceil(height * beta / factor) * factor
    return rounded


def most_squares_size(size: Size, resize: ResizeSpec) -> Size:
    """Return the size with as many whole squares of patches as the budget allows at the image's proportions.

    Source: transformers 5.23 `get_aspect_ratio_preserving_size` of Gemma4ImageProcessor, to the last bit.
    """
    width, height = size
    square, most = resize.patch_size * resize.merge_size, resize.max_patches // resize.merge_size**2
    factor = math.sqrt(resize.max_patches * resize.patch_size**2 / (height * width))
    columns, rows = (math.floor(factor * edge / square) for edge in size)
    if not rows:
        return min(width // height, most) * square, square
    if not columns:
        return square, min(height // width, most) * square
    return columns * square, rows * square


def kept_box(size: Size, resize: ResizeSpec) -> Box:
    """Return the box to keep of a scaled image: the middle square, or everything if it is padded.

    Source: torchvision 0.29 `center_crop`, which rounds half of the surplus (timm calls it), and transformers 5.23
    `TorchvisionBackend.center_crop`, which truncates it.
    """
    if resize.mode not in ("squash", "crop"):
        return 0, 0, *size
    half = int if resize.resampler == "torchvision" else round
    left, top = (half((edge - resize.image_size) / 2) for edge in size)
    return left, top, left + resize.image_size, top + resize.image_size


def long_cut(size: Size, resize: ResizeSpec) -> Box | None:
    """Return the box to keep of a very long image before the resize of a crop, or None for all.

    An image of 50,000 x 1 pixels is small, but not once its shortest side is scaled to 224. Whole squares are cut from
    both ends, which become whole pixels, so that the middle stays where it is.
    """
    fast = resize.reduced_decode and resize.resampler == "pillow"
    shortest = min(size)
    longest = (MAX_FAST_CROP_ASPECT if fast else MAX_CROP_ASPECT) * shortest
    left, top = (max(0, edge - longest) // (2 * shortest) * shortest for edge in size)
    if resize.mode != "crop" or not left + top:
        return None
    return left, top, size[0] - left, size[1] - top


def fitting_scale(size: Size, resize: ResizeSpec) -> int:
    """Return the factor by which decoding may reduce a JPEG's sides, if the model allows that.

    For a square it doesn't matter whether EXIF swaps the sides later.
    """
    if not resize.reduced_decode:
        return 1
    target = scaled_size(size, resize)
    room = min(have // (REDUCED_MARGIN * want) for have, want in zip(size, target, strict=True))
    return max((scale for scale in DRAFT_SCALES if scale <= room), default=1)


def needed_scale(size: Size, max_pixels: int) -> int:
    """Return the factor by which a JPEG's sides must be reduced to stay within a number of pixels; 8 at most."""
    width, height = size
    fitting = (scale for scale in DRAFT_SCALES if -(-width // scale) * -(-height // scale) <= max_pixels)
    return next(fitting, DRAFT_SCALES[-1])
