"""Forward pass of both towers in training: augmented images and padded captions to pooled features.

Images are augmented as tensors, with random numbers that depend only on (seed, epoch, the image's key). So neither the
number of workers nor the order of the images changes the result.

Legend: `N` images, `M` captions, `H` side in px, `L` tokens of one image, `T` tokens of the longest caption, `D` width
of a tower, `K` numbers drawn for each image.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from embedder.plugins.train.trainer.batch import TrainBatch
from embedder.plugins.train.trainer.train_settings import AugmentSettings, TrainSettings
from shards.activations import TowerState
from shards.layouts import check_pixels
from shards.length_groups import group_by_length
from shards.ranges import LayerRange
from shards.reference import TwinTower

# Random numbers of one image; patch dropout takes those after them.
NUM_DRAWS = 24

# YIQ: one axis of brightness, two of colour, so that rotating the latter changes the hue.
_TO_YIQ = ((0.299, 0.587, 0.114), (0.596, -0.274, -0.322), (0.211, -0.523, 0.312))

_UINT64 = (1 << 64) - 1


def image_features(
    towers: TwinTower, pixels_NHHC: torch.Tensor, batch: TrainBatch | None = None, settings: TrainSettings | None = None
) -> torch.Tensor:
    """Run the vision tower on images, uint8 (N, H, H, 3), augmented if a batch and settings are given.

    The batch's keys and epoch determine the augmentation. Features are (N, D), pooled, in the compute dtype. Raises
    `ModelError` if pixels aren't of the model's size.
    """
    vision = towers.config.required_vision
    check_pixels(pixels_NHHC, vision.side_px)
    if batch is None or settings is None or batch.image_keys is None:
        return _pool(towers, towers.normalise(pixels_NHHC, torch.float32), None)
    num_patches = vision.num_tokens - vision.num_prefix_tokens if settings.patch_dropout else 0
    draws = draw(batch.image_keys, settings.seed, batch.epoch, NUM_DRAWS + num_patches)
    device = towers.normalise.mean.device
    scaled = pixels_NHHC.to(device).permute(0, 3, 1, 2).float().div_(255)
    varied = augment(scaled, settings.augmentation, draws[:, :NUM_DRAWS])
    normalised = (varied - towers.normalise.mean) / towers.normalise.std
    kept = kept_tokens(draws[:, NUM_DRAWS:], settings.patch_dropout).to(device) if num_patches else None
    return _pool(towers, normalised, kept)


def _pool(towers: TwinTower, pixels_N3HH: torch.Tensor, kept_NK: torch.Tensor | None) -> torch.Tensor:
    tower, module = towers.config.required_vision, towers.vision
    layout = tower.layout(torch.ones(len(pixels_N3HH), dtype=torch.int64))
    x_NLD = tower.front(module, pixels_N3HH, layout)
    if kept_NK is not None:
        prefix, patches = x_NLD[:, : tower.num_prefix_tokens], x_NLD[:, tower.num_prefix_tokens :]
        kept = patches.gather(1, kept_NK[:, :, None].expand(-1, -1, x_NLD.shape[2]))
        x_NLD = torch.cat([prefix, kept], 1)
    x_NLD = tower.run(module, LayerRange(0, tower.num_layers), x_NLD, layout)
    return tower.pool_tokens(module, x_NLD, layout)


def caption_features(towers: TwinTower, token_ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Run the text tower on packed captions, in groups of similar length to save padding.

    `token_ids` are int32 of all captions, `lengths` int64 (M,) on the CPU. Features are (M, D), pooled, in the compute
    dtype. Raises `ModelError` if an id is outside the vocabulary, or a caption is too long.
    """
    towers.config.required_text.check_input(token_ids, lengths)
    captions = TowerState(token_ids, lengths)
    groups = [torch.from_numpy(group) for group in group_by_length(lengths.numpy())]
    features = [towers.pool("text", part) for part in map(captions.take, groups)]
    return torch.cat(features)[torch.cat(groups).argsort().to(features[0].device)]


def draw(keys: torch.Tensor, seed: int, epoch: int, num_draws: int) -> torch.Tensor:
    """Draw random numbers for each item's key, int64 (N,); float32 (N, K) in [0, 1).

    Source: SplitMix64 (Steele et al. 2014), run as a counter over draws from a state mixed from key, seed and epoch.
    """
    start = np.uint64(_mix(np.array([(seed * 0x9E3779B97F4A7C15 + epoch) & _UINT64], np.uint64))[0])
    state = _mix(keys.cpu().numpy().astype(np.int64).view(np.uint64) ^ start)
    counters = state[:, None] + np.arange(1, num_draws + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return torch.from_numpy((_mix(counters) >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24))


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def augment(pixels_N3HH: torch.Tensor, settings: AugmentSettings, draws_NK: torch.Tensor) -> torch.Tensor:
    """Vary colours and geometry of images, float32 (N, 3, H, H) in [0, 1], and erase rectangles.

    `draws_NK` are `NUM_DRAWS` float32 in [0, 1) for each image.
    """
    if settings.is_off or not len(pixels_N3HH):
        return pixels_N3HH
    numbers = iter(draws_NK.to(pixels_N3HH.device).unbind(1))
    pixels = _vary_colours(pixels_N3HH, settings, numbers)
    pixels = _move(pixels, settings, numbers)
    return _erase(pixels, settings, numbers)


def _to_range(numbers: Iterator[torch.Tensor], largest: float) -> torch.Tensor:
    """The next draw, as a number in [-largest, largest)."""
    return (next(numbers) * 2 - 1) * largest


def _vary_colours(pixels: torch.Tensor, settings: AugmentSettings, numbers: Iterator[torch.Tensor]) -> torch.Tensor:
    """Change hue, then saturation, contrast around middle grey, brightness and a ramp of light."""
    to_yiq = torch.tensor(_TO_YIQ, device=pixels.device)
    angle = _to_range(numbers, settings.hue) * 2 * math.pi
    saturation = 1 + _to_range(numbers, settings.saturation)
    saturation = torch.where(next(numbers) < settings.grey, torch.zeros_like(saturation), saturation)
    contrast = 1 + _to_range(numbers, settings.contrast)
    brightness = 1 + _to_range(numbers, settings.brightness)
    cos, sin, zero, one = angle.cos() * saturation, angle.sin() * saturation, angle * 0, angle * 0 + 1
    turn = torch.stack([one, zero, zero, zero, cos, -sin, zero, sin, cos], 1).view(-1, 3, 3)
    colours = torch.linalg.inv(to_yiq) @ turn @ to_yiq * (contrast * brightness)[:, None, None]
    offset = (0.5 * (1 - contrast) * brightness)[:, None, None]
    side = pixels.shape[-1]
    light = _light(settings, numbers, side).to(pixels.device)
    varied = torch.baddbmm(offset.expand(-1, 3, side * side), colours, pixels.flatten(2)).view_as(pixels)
    return (varied * light).clamp_(0, 1)


def _light(settings: AugmentSettings, numbers: Iterator[torch.Tensor], side: int) -> torch.Tensor:
    """A ramp of light in any direction: a factor for each pixel; (N, 1, H, H)."""
    strength, angle = _to_range(numbers, settings.shade), next(numbers) * 2 * math.pi
    ramp = torch.linspace(-1, 1, side, device=angle.device)
    slope = (strength * angle.cos())[:, None, None] * ramp + (strength * angle.sin())[:, None, None] * ramp[:, None]
    return 1 + slope[:, None]


def _move(pixels: torch.Tensor, settings: AugmentSettings, numbers: Iterator[torch.Tensor]) -> torch.Tensor:
    """Rotate, scale, shear, mirror and shift, in one resampling."""
    angle = _to_range(numbers, math.radians(settings.rotate_deg))
    scale_x, scale_y = (torch.exp(_to_range(numbers, math.log1p(settings.scale))) for _ in range(2))
    shear_x, shear_y = (_to_range(numbers, settings.shear) for _ in range(2))
    move_x, move_y = (_to_range(numbers, 2 * settings.translate) for _ in range(2))
    mirror = torch.where(next(numbers) < settings.flip, -1.0, 1.0)
    cos, sin = angle.cos(), angle.sin()
    matrix = torch.stack(
        [
            torch.stack([mirror * scale_x * cos, mirror * scale_x * (shear_x - sin), move_x], 1),
            torch.stack([scale_y * (sin + shear_y), scale_y * cos, move_y], 1),
        ],
        1,
    )
    grid = functional.affine_grid(matrix, list(pixels.shape), align_corners=False)
    # Pixels from outside are zeros; shift values so that they become `fill`.
    return functional.grid_sample(pixels - settings.fill, grid, align_corners=False) + settings.fill


def _erase(pixels: torch.Tensor, settings: AugmentSettings, numbers: Iterator[torch.Tensor]) -> torch.Tensor:
    """Overwrite a rectangle, each side 15 to 50 percent of the image's, with one colour."""
    is_erased = next(numbers) < settings.erase
    width, height = (0.15 + 0.35 * next(numbers) for _ in range(2))
    left, top = next(numbers) * (1 - width), next(numbers) * (1 - height)
    colour = torch.stack([next(numbers) for _ in range(3)], 1)[:, :, None, None]
    places = (torch.arange(pixels.shape[-1], device=pixels.device) + 0.5) / pixels.shape[-1]
    in_x = (places >= left[:, None]) & (places < (left + width)[:, None])
    in_y = (places >= top[:, None]) & (places < (top + height)[:, None])
    inside = (is_erased[:, None, None] & in_y[:, :, None] & in_x[:, None, :])[:, None]
    return torch.where(inside, colour, pixels)


def kept_tokens(draws_NL: torch.Tensor, share_left_out: float) -> torch.Tensor:
    """Choose the tokens of each image that patch dropout keeps; int64 (N, number kept), ascending.

    Source: Li et al. 2022, "Scaling Language-Image Pre-training via Masking" (FLIP).
    """
    num_kept = max(1, round(draws_NL.shape[1] * (1 - share_left_out)))
    return draws_NL.argsort(1)[:, :num_kept].sort(1).values
