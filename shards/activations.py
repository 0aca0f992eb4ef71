"""What passes between shards: values packed over the rows of a batch, and how many of them each row has.

Legend: `B` rows, `F` frames of all rows, `T` tokens of all rows, `L` tokens of one picture, `D` width, `R` rows that
have the side, `E` embedding size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

# What comes out of a shard on one side.
Output = Literal["activation", "embedding"]


@dataclass(frozen=True)
class TowerState:
    """One tower's state of a batch, without padding: rows lie one after the other.

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
    """Both towers' states of the same rows; a side that no row has may be None."""

    vision: TowerState | None
    text: TowerState | None
