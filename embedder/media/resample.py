"""torchvision's resize of 8-bit images, identical to the bit, as transformers prepares images.

Uses PyTorch's own kernel if that is worth loading, else NumPy. Pillow's resize differs by one level in about 3 % of the
values. Both filter along x, then along y, and round to 8 bits after each; PyTorch also rounds the filter weights to
16-bit integers.

Source: PyTorch 2.15, ATen/native/cpu: `_compute_index_ranges_int16_weights` of UpSampleKernel.cpp, and
UpSampleKernelAVXAntialias.h, which is what torchvision 0.29's `resize(antialias=True)` runs for uint8 on a CPU.
"""

import math
import time
from contextlib import suppress
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from embedder.media.arrays import Pixels, to_array, to_pillow
from embedder.media.resize import (
    PADDING_LEVELS,
    Box,
    Interpolation,
    ResizeSpec,
    Size,
    SizedPixels,
    kept_box,
    long_cut,
    scaled_size,
)
from embedder.media.torch_kernel import TorchKernel, TorchKernelError, load_kernel

Floats = NDArray[np.floating[Any]]

SUPPORT = {"bilinear": 1.0, "bicubic": 2.0, "lanczos": 3.0}
MAX_PRECISION, MAX_WEIGHT = 22, 2**15
BLOCK = 16  # neighbouring outputs read nearly the same inputs; wider blocks multiply more zeros
STRIP_PIXELS = 1 << 17  # filtered along x at a time: a second copy of the whole image would be large, and slower
LOAD_S = 0.3  # CPU time to load PyTorch's kernel and compare it with NumPy
MAX_COPIED_PIXELS = 24_000_000  # of Pillow's images, whose copy takes 3 bytes a pixel; larger ones go by strips
MAX_CACHED_PX = 1 << 14  # filters of a side of this length take 3 MB (bilinear), of a million pixels 150 MB


class ResampleBlock(NamedTuple):
    """Along one axis, outputs `start` to `stop` are inputs `first` to `last` times weights."""

    start: int
    stop: int
    first: int
    last: int
    weights: Floats  # (stop - start, last - first)


def resize_as_torchvision(image: Image.Image | Pixels, resize: ResizeSpec, size: Size | None = None) -> SizedPixels:
    """Resize an image with torchvision's filters, and crop or pad it to the square if the model takes one.

    `image` is Pillow's, RGB or L, or an array, uint8 (H, W, 3) or (H, W, 1). `size` is the width and height to resize
    to; None means those of the rule.
    """
    if cut := long_cut(size_of(image), resize):
        image = _crop(image, cut)
    size = size or scaled_size(size_of(image), resize)
    scaled = resample(image, size, kept_box(size, resize), resize.interpolation)
    if resize.mode in PADDING_LEVELS:
        scaled = _pad(scaled, resize.image_size, PADDING_LEVELS[resize.mode])
    if scaled.shape[2] == 1:
        scaled = scaled.repeat(3, 2)
    return SizedPixels((scaled.shape[1], scaled.shape[0]), np.ascontiguousarray(scaled).data.cast("B"))


def _pad(pixels_HWC: Pixels, side: int, level: int) -> Pixels:
    height, width, num_channels = pixels_HWC.shape
    square = np.full((side, side, num_channels), level, np.uint8)
    top, left = (side - height) // 2, (side - width) // 2
    square[top : top + height, left : left + width] = pixels_HWC
    return square


def size_of(image: Image.Image | Pixels) -> Size:
    """Return width and height."""
    return image.size if isinstance(image, Image.Image) else (image.shape[1], image.shape[0])


def _crop(image: Image.Image | Pixels, box: Box) -> Image.Image | Pixels:
    if isinstance(image, Image.Image):
        return image.crop(box)
    left, top, right, bottom = box
    return np.ascontiguousarray(image[top:bottom, left:right])


def resample(image: Image.Image | Pixels, size: Size, box: Box, interpolation: Interpolation) -> Pixels:
    """Resize an image to a width and height, and return a box of the result: uint8 (bottom - top, right - left, C).

    `image` is Pillow's, RGB or L, or a contiguous array, uint8 (H, W, 3) or (H, W, 1). `box` is left, top, right and
    bottom in pixels of the result.
    """
    kernel = _faster.of_filter(interpolation)
    width, height = size_of(image)
    if kernel is not None and (isinstance(image, np.ndarray) or width * height <= MAX_COPIED_PIXELS):
        pixels_HWC = to_array(image) if isinstance(image, Image.Image) else image
        with suppress(TorchKernelError):  # out of memory; NumPy needs less
            return kernel.resize(pixels_HWC, size, box, interpolation)
    started_s = time.perf_counter()
    resized = resample_in_numpy(image, size, box, interpolation)
    _faster.spent_s += time.perf_counter() - started_s
    return resized


class _FasterKernel:
    """PyTorch's kernel, loaded once this process has spent as long in NumPy as loading takes."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self.is_allowed = True

    @property
    def is_loaded(self) -> bool:
        return self.is_allowed and self.spent_s >= LOAD_S

    def of_filter(self, interpolation: Interpolation) -> TorchKernel | None:
        return _kernels().get(interpolation) if self.is_loaded else None


_faster = _FasterKernel()


def load_faster_kernel() -> None:
    """Load PyTorch's kernel now, in a process that will resize many images."""
    _faster.spent_s = LOAD_S
    _faster.of_filter("bilinear")


def forbid_faster_kernel() -> None:
    """Resize only in NumPy from now on."""
    _faster.is_allowed = False


def has_faster_kernel() -> bool:
    """Return whether PyTorch's kernel is loaded, which takes memory."""
    return _faster.is_loaded


@cache
def _kernels() -> dict[Interpolation, TorchKernel]:
    return load_kernel(resample_in_numpy)


def resample_in_numpy(image: Image.Image | Pixels, size: Size, box: Box, interpolation: Interpolation) -> Pixels:
    """Resize as `resample` does, without PyTorch; nothing outside the box is computed."""
    width, height = size_of(image)
    blocks = filter_blocks if max(height, width) <= MAX_CACHED_PX else filter_blocks.__wrapped__
    columns = blocks(width, size[0], box[0], box[2], interpolation)
    rows = blocks(height, size[1], box[1], box[3], interpolation)
    return _filter_rows(_filter_along_x(image, columns, rows[0].first, rows[-1].last), rows)


def _filter_along_x(image: Image.Image | Pixels, columns: tuple[ResampleBlock, ...], top: int, bottom: int) -> Pixels:
    """Filter the rows from `top` to `bottom` of an image: (bottom - top, width, C)."""
    left, right = columns[0].first, columns[-1].last
    num_rows = max(1, STRIP_PIXELS // (right - left))
    strips = (_crop(image, (left, y, right, min(y + num_rows, bottom))) for y in range(top, bottom, num_rows))
    return np.concatenate([_filter_rows(_transpose(strip), columns).transpose(1, 0, 2) for strip in strips])


def _transpose(strip: Image.Image | Pixels) -> Pixels:
    """Swap rows and columns to (W, H, C), with Pillow because it is three times as fast."""
    image = strip if isinstance(strip, Image.Image) else to_pillow(strip)
    return to_array(image.transpose(Image.Transpose.TRANSPOSE))


def _filter_rows(values: Pixels, blocks: tuple[ResampleBlock, ...]) -> Pixels:
    """Filter along the first axis, the inputs of the blocks: (last - first, N, C) -> (stop, N, C)."""
    inputs = values.reshape(len(values), -1)
    outputs = np.empty((blocks[-1].stop, inputs.shape[1]), np.uint8)
    for start, stop, first, last, weights in blocks:
        sums = weights @ inputs[first - blocks[0].first : last - blocks[0].first].astype(weights.dtype)
        sums += 0.5  # the cast truncates, so halves round up like the kernel's shift
        outputs[start:stop] = np.clip(sums, 0, 255, out=sums)
    return outputs.reshape(-1, *values.shape[1:])


@lru_cache(maxsize=16)
def filter_blocks(
    num_in: int, num_out: int, start: int, stop: int, interpolation: Interpolation
) -> tuple[ResampleBlock, ...]:
    """Return one axis's filter for the outputs `start` to `stop`, which count from 0 in the blocks.

    Weights are integers over 2^precision, and so are their products with 8-bit values and all sums of those. Floats
    hold them exactly, in any order of addition, while the sum of the absolute values, times 2^precision, is at most
    2^24 (float32: bilinear down to a quarter) or 2^53 (float64: always, being below 2^32).
    """
    firsts, parts, precision = _integer_weights(num_in, num_out, interpolation)
    firsts, parts = firsts[start:stop], parts[start:stop]
    largest = 255 * np.abs(parts).sum(1).max() + 2.0 ** (precision - 1)
    weights = np.ldexp(parts, -precision).astype(np.float32 if largest <= 2**24 else np.float64)
    blocks = []
    for at in range(0, stop - start, BLOCK):
        offsets = firsts[at : at + BLOCK] - firsts[at]
        dense = np.zeros((len(offsets), offsets[-1] + parts.shape[1]), weights.dtype)
        dense[np.arange(len(offsets))[:, None], offsets[:, None] + np.arange(parts.shape[1])] = weights[at : at + BLOCK]
        first, last = int(firsts[at]), min(int(firsts[at]) + dense.shape[1], num_in)
        blocks.append(ResampleBlock(at, at + len(offsets), first, last, dense[:, : last - first]))
    return tuple(blocks)


def _integer_weights(num_in: int, num_out: int, interpolation: Interpolation) -> tuple[NDArray[np.intp], Floats, int]:
    """Return each output's first input (num_out,), its integer weights (num_out, taps), and the precision."""
    scale = num_in / num_out
    support = SUPPORT[interpolation] * max(scale, 1.0)
    centres = scale * (np.arange(num_out) + 0.5)
    firsts = np.maximum((centres - support + 0.5).astype(np.intp), 0)
    lasts = np.minimum((centres + support + 0.5).astype(np.intp), num_in)
    inputs = firsts[:, None] + np.arange(2 * math.ceil(support) + 1)
    weights = _filter((inputs - centres[:, None] + 0.5) * (1 / max(scale, 1.0)), interpolation)
    weights[inputs >= lasts[:, None]] = 0
    weights /= np.cumsum(weights, 1)[:, -1:]  # added from left to right, as the kernel does
    precision = max(p for p in range(MAX_PRECISION + 1) if 0.5 + weights.max() * 2**p < MAX_WEIGHT)
    return firsts, np.trunc(np.ldexp(weights, precision) + np.copysign(0.5, weights)), precision


def _filter(x: NDArray[np.float64], interpolation: Interpolation) -> NDArray[np.float64]:
    x = np.abs(x)
    if interpolation == "bilinear":
        return np.maximum(1 - x, 0)
    if interpolation == "bicubic":  # Keys, 1981, with a = -0.5
        return np.where(x < 1, (1.5 * x - 2.5) * x * x + 1, np.where(x < 2, (((x - 5) * x + 8) * x - 4) * -0.5, 0))
    return np.where(x < 3, np.sinc(x) * np.sinc(x / 3), 0)
