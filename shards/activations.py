"""States that pass between shards: values packed over the rows of a batch, and their number in each row.

Legend: `B` rows, `F` frames of all rows, `T` tokens of all rows, `L` tokens of one image, `D` width, `R` rows that
have the side, `E` embedding size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

    from shards.towers.base import Tower

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
        grids: int32 (B, 3), on the CPU: frames, patch rows and patch columns of each row, zeros where the row lacks
            this side; None for a tower whose inputs need none.
    """

    values: torch.Tensor
    lengths: torch.Tensor
    grids: torch.Tensor | None = None

    def take(self, rows: torch.Tensor) -> TowerState:
        """Gather some rows, int64 (R,), in this order."""
        import torch

        lengths = self.lengths[rows]
        starts = self.lengths.cumsum(0)[rows] - lengths
        # Element n of the result is its row's first element, and as many on as n is behind the row's first place.
        moves = starts - (lengths.cumsum(0) - lengths)
        places = torch.arange(int(lengths.sum())) + moves.repeat_interleave(lengths)
        grids = None if self.grids is None else self.grids[rows]
        return TowerState(self.values[places.to(self.values.device)], lengths, grids)

    def groups(self, tower: Tower) -> list[torch.Tensor]:
        """Find the groups of rows that a tower computes together, int64; all rows have this side."""
        import torch

        from shards.length_groups import group_by_length

        tokens = tower.tokens_per_sequence(self.lengths, self.grids)
        if tokens is None:
            return [torch.arange(len(self.lengths))]
        return [torch.from_numpy(group) for group in group_by_length(tokens.numpy())]

    def run_in_groups(self, tower: Tower, run: Callable[[TowerState], TowerState]) -> TowerState:
        """Run a function on groups of rows of similar length, and put the results back in place.

        Args:
            tower: groups by the tokens that it counts; without a count, all rows are one group.
            run: computes rows that all have this side; at least one row here has it.
        """
        import torch

        rows = self.lengths.nonzero().squeeze(1)
        present = self if len(rows) == len(self.lengths) else self._without_empty(rows)
        groups = present.groups(tower)
        if len(groups) == 1:
            done = run(present)
        else:
            parts = [run(present.take(group)) for group in groups]
            values, lengths = (torch.cat([getattr(part, name) for part in parts]) for name in ("values", "lengths"))
            done = TowerState(values, lengths).take(torch.cat(groups).argsort())
        return TowerState(done.values, torch.zeros_like(self.lengths).index_copy(0, rows, done.lengths), self.grids)

    def _without_empty(self, rows: torch.Tensor) -> TowerState:
        """Leave out rows without elements."""
        return TowerState(self.values, self.lengths[rows], None if self.grids is None else self.grids[rows])


@dataclass(frozen=True)
class Batch:
    """States of the same rows in both towers; a side that no row has may be None."""

    vision: TowerState | None
    text: TowerState | None
