"""Batches of a training step.

Legend: `N` images, `M` captions, `T` tokens of all captions, `C` concepts, `H` side in px, `D` width of a tower,
`F` size of a teacher's space.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TrainBatch:
    """Images and captions; those of one concept are positives of each other, all others negatives.

    A pair of image and caption is its own concept unless its source says otherwise. With loss "concepts", either side
    may be empty. `pixels` is uint8 (N, H, H, 3), `image_concepts` int64 (N,), `caption_concepts` int64 (M,).
    `token_ids`, int32 (T,), are caption after caption, with [CLS] and [SEP], without padding; `token_lengths`, int64
    (M,), on the CPU, sum to T. `image_keys`, int64 (N,), on the CPU, and `epoch` determine the augmentation; None for
    no augmentation. `caption_positives` is for captions of several concepts with loss "concepts": bool (M, C), or
    float32 shares that sum to 1; else None. A teacher's vectors are float32 (N, F) and (M, F), unit rows, NaN where
    there is none; None without a teacher.
    """

    pixels: torch.Tensor
    image_concepts: torch.Tensor
    token_ids: torch.Tensor
    token_lengths: torch.Tensor
    caption_concepts: torch.Tensor
    image_keys: torch.Tensor | None = None
    epoch: int = 0
    caption_positives: torch.Tensor | None = None
    teacher_images: torch.Tensor | None = None
    teacher_captions: torch.Tensor | None = None


@dataclass(frozen=True)
class FeatureBatch:
    """Outputs of frozen towers for a batch, computed once; enough to train the projections.

    Features are float32 (N, D) and (M, D), pooled, before the projection; the rest is as in `TrainBatch`.
    """

    image_features: torch.Tensor
    image_concepts: torch.Tensor
    caption_features: torch.Tensor
    caption_concepts: torch.Tensor
    teacher_images: torch.Tensor | None = None
    teacher_captions: torch.Tensor | None = None


def item_key(item_id: str) -> int:
    """Hash an item's id to an int64 that is the same on every machine."""
    import hashlib

    return int.from_bytes(hashlib.sha256(item_id.encode()).digest()[:8], "little", signed=True)
