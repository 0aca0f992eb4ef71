"""Layout of pictures in a decoder with eyes: patches, then the tokens of a conversation that holds the picture.

A picture's patches come in squares of `merge` x `merge`, row by row of squares; each square becomes one token. Packed
activations hold, for each picture: in front of the decoder one element per square; inside it one per token, behind
those one per square for each input to a layer that is still to come (DeepStack).

Legend: `R` rows, `F` pictures (frames) of all rows, `N` patches of all pictures, `M` squares of all pictures, `L`
tokens of the longest conversation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shards.layouts import Move, Padding, RowMeans
from shards.towers.base import Rows

TEXT, PICTURE = 0, 1


Template = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""Token ids of a conversation around a picture: before it, right behind it, and behind a text that follows."""


@dataclass(frozen=True)
class Places:
    """Positions of tokens, int64 (tokens,), and of each input to a later layer, int64 (M,), in the packed values."""

    tokens: torch.Tensor
    inputs: tuple[torch.Tensor, ...]

    @staticmethod
    def of(tokens: torch.Tensor, squares: torch.Tensor, num_inputs: int) -> "Places | None":
        """Find them by each picture's tokens and squares, (F,); None if the packed values are only tokens, in order."""
        if not num_inputs:
            return None
        parts = torch.stack([tokens, *[squares] * num_inputs], 1)
        kinds = torch.arange(num_inputs + 1).repeat(len(tokens)).repeat_interleave(parts.flatten())
        found = [(kinds == kind).nonzero().squeeze(1) for kind in range(num_inputs + 1)]
        return Places(found[0], tuple(found[1:]))

    def move_to(self, move: Move) -> "Places":
        """Move them to the device."""
        return Places(move(self.tokens), tuple(map(move, self.inputs)))


@dataclass(frozen=True)
class PictureTokens:
    """Layout of pictures, each in a conversation of its own.

    Attributes:
        grids: int64 (F, 3), on the CPU: 1, patch rows and patch columns of each picture.
        means: over the pictures of each row.
        elements_per_row: number of packed elements behind the last layer, int64 (R,), on the CPU.
        tokens: rectangle of the conversations.
        ids: int64 (F, L), token ids; any where a picture's tokens are.
        positions: int64 (3, F, L): time, row and column of each token.
        picture: int64 (M,), positions of the pictures' tokens in the flattened rectangle.
        start: where the packed values in front of the first layer lie; None if they are in order.
        stop: the same behind the last layer.
    """

    grids: torch.Tensor
    means: RowMeans
    elements_per_row: torch.Tensor
    tokens: Padding
    ids: torch.Tensor
    positions: torch.Tensor
    picture: torch.Tensor
    start: Places | None
    stop: Places | None

    @staticmethod
    def of(
        rows: Rows, merge: int, template: Template, inputs: tuple[int, int], *, is_inside: tuple[bool, bool]
    ) -> "PictureTokens":
        """Lay out rows by their grids and texts, on the CPU.

        `inputs` counts the inputs to layers that are still to come, in front of the first layer and behind the last;
        `is_inside` says whether each of the two is inside the decoder.
        """
        assert rows.grids is not None  # noqa: S101 - its caller has looked
        grids = rows.grids.long()
        frames = grids[:, 0]
        each = grids.repeat_interleave(frames, 0).index_fill(1, torch.tensor([0]), 1)
        squares = each[:, 1] * each[:, 2] // merge**2
        texts = _texts(rows, frames)
        lengths = squares + sum(map(len, template))
        lengths = lengths + torch.tensor([len(text) for text in texts])
        tokens = Padding.of(lengths)
        ids, positions, kinds = _conversations(each, squares, texts, template, merge, tokens.shape)
        counts = squares if not is_inside[1] else lengths + inputs[1] * squares
        starts, stops = (
            Places.of(lengths, squares, number) if inside else None
            for number, inside in zip(inputs, is_inside, strict=True)
        )
        row_of = torch.arange(len(frames)).repeat_interleave(frames)
        elements = torch.zeros_like(frames).index_add(0, row_of, counts)
        picture = (kinds == PICTURE).flatten().nonzero().squeeze(1)
        return PictureTokens(each, RowMeans.of(frames), elements, tokens, ids, positions, picture, starts, stops)

    def move_to(self, move: Move) -> "PictureTokens":
        """Move what the layers need to their device."""
        return replace(
            self,
            means=self.means.move_to(move),
            tokens=self.tokens.move_to(move),
            ids=move(self.ids),
            positions=move(self.positions),
            picture=move(self.picture),
            start=self.start and self.start.move_to(move),
            stop=self.stop and self.stop.move_to(move),
        )

    def pad(self, values: torch.Tensor) -> torch.Tensor:
        """Return the packed values unchanged: layers unpack them."""
        return values

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Return the packed values unchanged."""
        return x


def _texts(rows: Rows, frames: torch.Tensor) -> list[list[int]]:
    """Return the token ids of the text of each picture: its row's."""
    if rows.text is None:
        return [[]] * int(frames.sum())
    ids, stops = rows.text.values.tolist(), rows.text.lengths.cumsum(0).tolist()
    texts = [ids[stop - length : stop] for stop, length in zip(stops, rows.text.lengths.tolist(), strict=True)]
    return [text for text, number in zip(texts, frames.tolist(), strict=True) for _ in range(number)]


def _conversations(
    grids: torch.Tensor,
    squares: torch.Tensor,
    texts: list[list[int]],
    template: Template,
    merge: int,
    shape: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ids (F, L), positions (3, F, L) and kinds (F, L) of the tokens of each conversation.

    Source: transformers 5.23, `Qwen3VLModel.get_rope_index`: a text's tokens count on in all three; a picture's keep
    the time and count rows and columns from there; what follows begins behind the longer side.
    """
    ids, kinds = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    positions = torch.zeros((3, *shape), dtype=torch.int64)
    before, between, after = template
    first = len(before)
    for number, ((_, rows, columns), size, text) in enumerate(
        zip((grids // merge).tolist(), squares.tolist(), texts, strict=True)
    ):
        rest = [*between, *text, *after]
        stop = first + size
        ids[number, :first] = torch.tensor(before, dtype=torch.int64)
        ids[number, stop : stop + len(rest)] = torch.tensor(rest, dtype=torch.int64)
        kinds[number, first:stop] = PICTURE
        positions[:, number, :first] = torch.arange(first)
        places = torch.arange(size)
        positions[:, number, first:stop] = first + torch.stack([places * 0, places // columns, places % columns])
        positions[:, number, stop : stop + len(rest)] = first + max(rows, columns) + torch.arange(len(rest))
    return ids, positions, kinds


def causal_mask(tokens: Any) -> torch.Tensor | None:
    """Make the mask by which a token attends to those before it, bool (F, 1, L, L); None without padding."""
    if tokens.mask is None:
        return None
    side = tokens.is_token.shape[1]
    before = torch.ones((side, side), dtype=torch.bool, device=tokens.is_token.device).tril()
    mask: torch.Tensor = tokens.is_token[:, None, None, :] & before
    return mask
