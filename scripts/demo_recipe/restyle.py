"""Changes of drawings that styles differ by: bent shapes, other colours, thicker or softer lines.

Legend: `N` images, `H` side in px, `G` side of the grid that is bent.
"""

import torch
from torch.nn import functional

GRID = 4
BENT = 0.12  # by up to this share of half the side, at points of the grid
CURVED = 0.6  # a channel's values are raised to powers from 1 / (1 + this) to 1 + this
FILTERED = 0.5  # share of images whose lines are changed


def restyled(pixels: torch.Tensor, seed: int) -> torch.Tensor:
    """Bend, recolour and filter each image in its own way; what is white stays white.

    Args:
        pixels: uint8 (N, H, H, 3).
        seed: that everything follows from.
    """
    generator = torch.Generator().manual_seed(seed)
    ink_N3HH = 1 - pixels.permute(0, 3, 1, 2).float() / 255
    ink_N3HH = _filtered(_bent(ink_N3HH, generator), generator)
    powers = torch.exp(_spread((len(pixels), 3, 1, 1), CURVED, generator))
    light = (1 - ink_N3HH.clamp(0, 1)) ** powers
    return (light * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def _spread(shape: tuple[int, ...], factor: float, generator: torch.Generator) -> torch.Tensor:
    """Logarithms of factors, as many above 1 as below."""
    return (torch.rand(shape, generator=generator) * 2 - 1) * torch.log1p(torch.tensor(factor))


def _bent(ink_N3HH: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Move the points of a coarse grid, and what lies between them smoothly with them."""
    count, side = len(ink_N3HH), ink_N3HH.shape[-1]
    moves = (torch.rand((count, 2, GRID, GRID), generator=generator) * 2 - 1) * BENT
    moves = functional.interpolate(moves, size=side, mode="bicubic", align_corners=True).permute(0, 2, 3, 1)
    straight = functional.affine_grid(torch.eye(2, 3).expand(count, 2, 3), list(ink_N3HH.shape), align_corners=False)
    return functional.grid_sample(ink_N3HH, straight + moves, align_corners=False)


def _filtered(ink_N3HH: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Thicken ink, soften it, or draw its edges more, at a strength of each image's own."""
    kinds = torch.rand((len(ink_N3HH), 1, 1, 1), generator=generator) / FILTERED
    strength = torch.rand((len(ink_N3HH), 1, 1, 1), generator=generator)
    soft = functional.avg_pool2d(ink_N3HH, 3, 1, 1)
    thick = functional.max_pool2d(ink_N3HH, 3, 1, 1)
    sharp = 2 * ink_N3HH - soft
    wanted = torch.where(kinds < 0.33, soft, torch.where(kinds < 0.66, thick, sharp))
    return torch.where(kinds < 1, torch.lerp(ink_N3HH, wanted, strength), ink_N3HH)
