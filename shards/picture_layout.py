"""Layout of pictures in a decoder with eyes: patches, then the tokens of a conversation that holds the picture.

A clip is as a picture, in which several frames are computed together as one, and these follow each other. A picture's
patches come in squares of `merge` x `merge`, row by row of squares; each square becomes one token. Packed activations
hold, for each picture: in front of the decoder one element per square; inside it one per token, behind those one per
square for each input to a layer that is still to come (DeepStack).

Legend: `R` rows, `F` pictures and clips of all rows, `N` patches and `M` squares of all of them, `T` frames that are
computed together, `L` tokens of the longest conversation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Protocol

import torch

from shards.layouts import Move, Padding, RowMeans
from shards.model_errors import ModelError
from shards.towers.base import Rows

PICTURE = 1  # kind of a token; a text's is 0


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


class PatchLayout(Protocol):
    """How the patches of pictures lie in a family's vision blocks; made on the host, only of the pictures' sizes."""

    def move_to(self, move: Move) -> "PatchLayout":
        """Move what the blocks need to their device."""


@dataclass(frozen=True)
class PictureTokens:
    """Layout of pictures and clips, each in its own conversation.

    Attributes:
        grids: int64 (F, 3), on the CPU: places, patch rows and patch columns of each; a picture has one place.
        means: over the pictures of each row.
        elements_per_row: number of packed elements behind the last layer, int64 (R,), on the CPU.
        tokens: rectangle of the conversations.
        ids: int64 (F, L), token ids; any where a picture's tokens are.
        positions: int64 (3, F, L): time, row and column of each token.
        picture: int64 (M,), positions of the pictures' tokens in the flattened rectangle.
        times: int64 (N, T), the patches of the frames that are computed together; None if all of each are one.
        start: where the packed values in front of the first layer lie; None if they are in order.
        stop: the same behind the last layer.
        patches: as the vision blocks and the merger take them; None behind those.
    """

    grids: torch.Tensor
    means: RowMeans
    elements_per_row: torch.Tensor
    tokens: Padding
    ids: torch.Tensor
    positions: torch.Tensor
    picture: torch.Tensor
    times: torch.Tensor | None
    start: Places | None
    stop: Places | None
    patches: PatchLayout | None = None

    @staticmethod
    def of(
        rows: Rows,
        merge: int,
        frames_together: int,
        template: Template,
        inputs: tuple[int, int],
        *,
        is_inside: tuple[bool, bool],
    ) -> "PictureTokens":
        """Lay out rows by their grids and texts, on the CPU; a ModelError for a clip of another number of frames.

        `inputs` counts the inputs to layers that are still to come, in front of the first layer and behind the last;
        `is_inside` says whether each of the two is inside the decoder.
        """
        assert rows.grids is not None  # noqa: S101 - its caller has looked
        shown = rows.grids.long()
        texts, words, is_clip = _texts(rows, shown[:, 0], frames_together, sum(map(len, template)))
        pictures = torch.where(is_clip, 1, shown[:, 0])
        row_of = torch.arange(len(shown)).repeat_interleave(pictures)
        frames, grids = _grids(shown[row_of], is_clip[row_of], frames_together)
        squares = grids.prod(1) // merge**2
        held, tokens = [_conversation(texts[row], template) for row in row_of], Padding.of(squares + words[row_of])
        ids, positions, kinds = _conversations(grids // merge, held, tokens.shape)
        counts = squares if not is_inside[1] else tokens.lengths + inputs[1] * squares
        starts, stops = (
            Places.of(tokens.lengths, squares, number) if inside else None
            for number, inside in zip(inputs, is_inside, strict=True)
        )
        return PictureTokens(
            grids=grids,
            means=RowMeans.of(pictures),
            elements_per_row=torch.zeros_like(pictures).index_add(0, row_of, counts),
            tokens=tokens,
            ids=ids,
            positions=positions,
            picture=(kinds == PICTURE).flatten().nonzero().squeeze(1),
            times=_frames_together(grids, frames, frames_together) if is_clip.any() else None,
            start=starts,
            stop=stops,
        )

    def move_to(self, move: Move) -> "PictureTokens":
        """Move what the layers need to their device."""
        return replace(
            self,
            means=self.means.move_to(move),
            tokens=self.tokens.move_to(move),
            ids=move(self.ids),
            positions=move(self.positions),
            picture=move(self.picture),
            times=None if self.times is None else move(self.times),
            start=self.start and self.start.move_to(move),
            stop=self.stop and self.stop.move_to(move),
            patches=self.patches and self.patches.move_to(move),
        )

    def pad(self, values: torch.Tensor) -> torch.Tensor:
        """Return the packed values unchanged: layers unpack them."""
        return values

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Return the packed values unchanged."""
        return x


def count_places(text: Rows) -> torch.Tensor:
    """Count the places of frames in each row's text, int64 (R,); 0 for what is no clip's."""
    row_of = torch.arange(len(text.lengths)).repeat_interleave(text.lengths)
    return torch.zeros_like(text.lengths).index_add(0, row_of, (text.values < 0).long())


def _texts(
    rows: Rows, frames: torch.Tensor, frames_together: int, num_around: int
) -> tuple[list[list[int]], torch.Tensor, torch.Tensor]:
    """Return each row's text, how many tokens without those of pictures its conversation has, and if it is a clip.

    Raises a ModelError for a clip that has places for another number of frames.
    """
    if rows.text is None:
        return [[]] * len(frames), torch.full_like(frames, num_around), torch.zeros_like(frames).bool()
    places, lengths = count_places(rows.text), rows.text.lengths
    is_clip = places > 0
    if not places[is_clip].equal(-(-frames[is_clip] // frames_together)):
        raise ModelError(
            f"image_text: clips of {frames[is_clip].tolist()[:5]} frames have {places[is_clip].tolist()[:5]} places, "
            f"each for {frames_together} of them; decode with the model folder's preprocess"
        )
    ids, stops = rows.text.values.tolist(), lengths.cumsum(0).tolist()
    texts = [ids[stop - length : stop] for stop, length in zip(stops, lengths.tolist(), strict=True)]
    return texts, torch.where(is_clip, lengths - places, lengths + num_around), is_clip


def _grids(shown: torch.Tensor, is_clip: torch.Tensor, frames_together: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the frames of each picture or clip, (F,), and its grid with places of frames, (F, 3)."""
    frames = torch.where(is_clip, shown[:, 0], 1)
    return frames, torch.cat([-(-frames // frames_together)[:, None], shown[:, 1:]], 1)


def _conversation(text: list[int], template: Template) -> list[list[int]]:
    """Return the parts of a conversation: token ids, or negative numbers for the places that a clip's text has."""
    before, between, after = template
    if not text or min(text) >= 0:
        return [[*before], [-1], [*between, *text, *after]]
    return [list(part) for _, part in groupby(text, lambda each: each < 0)]


def _frames_together(grids: torch.Tensor, frames: torch.Tensor, frames_together: int) -> torch.Tensor:
    """Return the patches of the frames that are computed together, (N, T); the last frame fills up the last ones."""
    found, start = [], 0
    for (places, *sides), number in zip(grids.tolist(), frames.tolist(), strict=True):
        size = sides[0] * sides[1]
        shown = torch.arange(places * frames_together).clamp(max=number - 1).view(places, 1, frames_together)
        found.append((start + shown * size + torch.arange(size)[None, :, None]).flatten(0, 1))
        start += number * size
    return torch.cat(found)


def _conversations(
    grids: torch.Tensor, held: list[list[list[int]]], shape: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ids (F, L), positions (3, F, L) and kinds (F, L) of the tokens of each conversation.

    `grids` has places, and rows and columns of squares. Source: transformers 5.23, `get_rope_index` of `Qwen3VLModel`
    and `Qwen2_5_VLModel`: a text's tokens count on in all three; a picture's keep the time, a clip's move it from place
    to place, and count rows and columns from there; what follows begins behind the longer side.
    """
    ids, kinds = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    positions = torch.zeros((3, *shape), dtype=torch.int64)
    for number, ((_, rows, columns), parts) in enumerate(zip(grids.tolist(), held, strict=True)):
        start = position = 0
        for own in (torch.tensor(part, dtype=torch.int64) for part in parts if part):
            if own[0] >= 0:
                stop, moved = start + len(own), len(own)
                ids[number, start:stop] = own
                positions[:, number, start:stop] = position + torch.arange(len(own))
            else:
                places = torch.arange(rows * columns).repeat(len(own))
                times = (-1 - own).repeat_interleave(rows * columns)
                stop, moved = start + len(places), max(rows, columns)
                kinds[number, start:stop] = PICTURE
                positions[:, number, start:stop] = position + torch.stack([times, places // columns, places % columns])
            start, position = stop, position + moved
    return ids, positions, kinds


def causal_mask(tokens: Any) -> torch.Tensor | None:
    """Make the mask by which a token attends to those before it, bool (F, 1, L, L); None without padding."""
    if tokens.mask is None:
        return None
    side = tokens.is_token.shape[1]
    before = torch.ones((side, side), dtype=torch.bool, device=tokens.is_token.device).tril()
    mask: torch.Tensor = tokens.is_token[:, None, None, :] & before
    return mask
