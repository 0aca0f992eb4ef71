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
    may be empty.

    Attributes:
        pixels: uint8 (N, H, H, 3).
        image_concepts: int64 (N,).
        token_ids: int32 (T,), caption after caption, with [CLS] and [SEP], without padding.
        token_lengths: int64 (M,), on the CPU; they sum to T.
        caption_concepts: int64 (M,).
        image_keys: int64 (N,), on the CPU: `item_key` of each item, which with the epoch determines its augmentation;
            None for no augmentation.
        epoch: number of passes over the data so far.
        caption_positives: for loss "concepts" if a caption fits several concepts: bool (M, C), or float32 with the
            share of each, summing to 1; else None.
        teacher_images: float32 (N, F), unit rows, NaN where the teacher has no vector; None without a teacher.
        teacher_captions: float32 (M, F), likewise.
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
