"""States that pass between shards: values packed over the rows of a batch, and their number in each row.

Legend: `B` rows, `F` frames of all rows, `T` tokens of all rows, `L` tokens of one image, `D` width, `R` rows that
have the side, `E` embedding size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

# Kinds of output of a shard on one side.
Output = Literal["activation", "embedding"]


@dataclass(frozen=True)
class TowerState:
    """State of a batch in one tower, packed without padding.

    Attributes:
        values: pixels uint8 (F, H, W, 3) | token ids int32 (T,) | activation (F, L, D) or (T, D) in the compute dtype |
            embedding float32 (R, E).
        lengths: int64 (B,), on the CPU: frames or tokens of each row, 0 where the row lacks this side; for the
            embedding 0 or 1. They sum to the first dimension of `values`.
    """

    values: torch.Tensor
    lengths: torch.Tensor


@dataclass(frozen=True)
class Batch:
    """States of the same rows in both towers; a side that no row has may be None."""

    vision: TowerState | None
    text: TowerState | None
