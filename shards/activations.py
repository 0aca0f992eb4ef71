"""States that pass between shards: values packed over the rows of a batch, and the number of elements in each row.

Legend: `B` rows, `F` frames of all rows, `T` tokens of all rows, `L` tokens of one image, `D` width, `R` rows that have
the side, `E` embedding size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from shards.length_groups import CPU_GROUPS, GroupCosts, group_by_length

if TYPE_CHECKING:
    import torch

    from shards.layouts import Layout, Move
    from shards.ranges import LayerRange
    from shards.towers.base import Tower

# Kinds of output of a shard on one side.
Output = Literal["activation", "embedding"]


@dataclass(frozen=True)
class TowerState:
    """State of a batch in one tower, packed without padding.

    Attributes:
        values: pixels uint8 (F, H, W, 3) | token ids int32 (T,) | activation (F, L, D) or (T, D) in the compute dtype |
            embedding float32 (R, E).
        lengths: int64 (B,), on the CPU: frames or tokens of each row, 0 where the row lacks this side; 0 or 1 for
            embeddings. They sum to the first dimension of `values`.
        grids: int32 (B, 3), on the CPU: frames, patch rows and patch columns of each row, zeros where the row lacks
            this side; None for a tower without grids.
        text: token ids int32 (T,) and their lengths (B,), on the CPU, of a text that each image comes with, for a tower
            whose vector is of both; None for only images. A clip's is all that its frames are in: in a place of theirs
            it has -1 - t, where t is their position in time from the last text.
    """

    values: torch.Tensor
    lengths: torch.Tensor
    grids: torch.Tensor | None = None
    text: TowerState | None = None

    def take(self, rows: torch.Tensor) -> TowerState:
        """Gather some rows, int64 (R,), in this order."""
        grids = None if self.grids is None else self.grids[rows]
        places = element_places(self.lengths, rows).to(self.values.device)
        return TowerState(self.values[places], self.lengths[rows], grids, self.text and self.text.take(rows))

    def groups(self, tower: Tower, costs: GroupCosts = CPU_GROUPS) -> list[torch.Tensor]:
        """Return the groups of rows that a tower computes together, int64; all rows must have this side."""
        import torch

        tokens = tower.tokens_per_sequence(self)
        if tokens is None:
            return [torch.arange(len(self.lengths))]
        if not tower.pads_rows:  # a price of nothing joins only equal lengths
            costs = replace(costs, price_tokens=0.0)
        return [torch.from_numpy(group) for group in group_by_length(tokens.numpy(), costs)]


def element_places(lengths: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the positions (int64) of some rows' elements among those of all rows, given lengths (B,) and rows (R,)."""
    import torch

    own = lengths[rows]
    starts = lengths.cumsum(0)[rows] - own
    # Element n of the result lies as far behind its row's first element as n lies behind the row's first position.
    moves = starts - (own.cumsum(0) - own)
    return torch.arange(int(own.sum())) + moves.repeat_interleave(own)


@dataclass(frozen=True)
class Arrangement:
    """How a tower computes one side of a batch: which rows in which rectangle, and where the results go.

    It is made on the host from lengths only, and moved to the device at once, so that the layers never synchronise.
    Each of `groups` has its elements' positions in the state (int64, None: all), layout, and lengths and grids on the
    CPU. `order` has the result's positions in the concatenated results, None for one group. `lengths` int64 (B,) is on
    the CPU.
    """

    groups: tuple[tuple[torch.Tensor | None, Layout, TowerState], ...]
    order: torch.Tensor | None
    lengths: torch.Tensor

    @staticmethod
    def of(
        state: TowerState, tower: Tower, output: Output, layers: LayerRange, costs: GroupCosts = CPU_GROUPS
    ) -> Arrangement:
        """Arrange a state of which at least one row has this side, for a range of layers; its values don't matter.

        Rows are grouped by the tokens that the tower counts; without a count, all rows are one group.
        """
        import torch

        rows = state.lengths.nonzero().squeeze(1)
        grids = None if state.grids is None else state.grids[rows]
        present = TowerState(state.values, state.lengths[rows], grids, state.text and state.text.take(rows))
        inputs = replace(present, lengths=tower.input_lengths(present.lengths, layers))
        numbers, groups, found = inputs.groups(tower, costs), [], []
        for number in numbers:
            lengths = present.lengths[number]
            text = present.text and present.text.take(number)
            own = TowerState(present.values[:0], lengths, None if grids is None else grids[number], text)
            layout = tower.arrange(own, layers)
            places = element_places(present.lengths, number) if len(numbers) > 1 else None
            groups.append((places, layout, own))
            found.append(lengths.clamp(max=1) if output == "embedding" else layout.elements_per_row)
        done, order = found[0], None
        if len(numbers) > 1:
            done, back = torch.cat(found), torch.cat(numbers).argsort()
            order, done = element_places(done, back), done[back]
        return Arrangement(tuple(groups), order, torch.zeros_like(state.lengths).index_copy(0, rows, done))

    def move_to(self, move: Move) -> Arrangement:
        """Move what the layers need to their device."""
        groups = tuple(
            (None if places is None else move(places), layout.move_to(move), own) for places, layout, own in self.groups
        )
        return Arrangement(groups, None if self.order is None else move(self.order), self.lengths)

    def run(self, state: TowerState, compute: Callable[[torch.Tensor, Layout, TowerState], torch.Tensor]) -> TowerState:
        """Compute all groups and put the results in place; the state is on the arrangement's device.

        `compute` maps the values of a group, its layout, and its lengths and grids to the result.
        """
        import torch

        parts = [
            compute(state.values if places is None else state.values[places], layout, own)
            for places, layout, own in self.groups
        ]
        values = parts[0] if self.order is None else torch.cat(parts)[self.order]
        return replace(state, values=values, lengths=self.lengths)


@dataclass(frozen=True)
class Batch:
    """States of the same rows in both towers; a side that no row has may be None."""

    vision: TowerState | None
    text: TowerState | None

    def move_to(self, move: Move) -> Batch:
        """Move the values of both sides."""
        states = (self.vision, self.text)
        return Batch(*(state and replace(state, values=move(state.values)) for state in states))


@dataclass(frozen=True)
class Arranged:
    """A batch with the arrangement of each side that has layers to run."""

    batch: Batch
    arrangements: dict[str, Arrangement]

    def move_to(self, move: Move) -> Arranged:
        """Move the values of these sides, and what their layers need, to the layers' device."""

        def move_state(side: str, state: TowerState | None) -> TowerState | None:
            return replace(state, values=move(state.values)) if state and side in self.arrangements else state

        batch = Batch(move_state("vision", self.batch.vision), move_state("text", self.batch.text))
        return Arranged(batch, {side: each.move_to(move) for side, each in self.arrangements.items()})
