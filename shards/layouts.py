"""Layouts of a batch's inputs inside a tower's layers, and checks of the inputs.

Legend: `F` frames, `H, W` sides in px, `R` captions, `T` tokens of the longest one, `N` tokens of all captions.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn

from shards.model_errors import ModelError
from shards.preprocess import PreprocessConfig

Move = Callable[[torch.Tensor], torch.Tensor]
"""Moves a tensor from the host to the device of the layers."""


def _move(values: torch.Tensor | None, move: Move) -> torch.Tensor | None:
    return None if values is None else move(values)


@dataclass(frozen=True)
class RowMeans:
    """Means over the vectors of each row, such as those of a video's frames.

    `parts` groups rows that have the same number of vectors: that number, the positions of their vectors, and the
    positions of the rows; both positions are None where all rows have the same number.
    """

    num_rows: int
    parts: tuple[tuple[int, torch.Tensor | None, torch.Tensor | None], ...]

    @staticmethod
    def of(lengths: torch.Tensor) -> "RowMeans":
        """Group rows by their number of vectors, int64 (R,), on the CPU, each at least 1."""
        numbers = sorted(set(lengths.tolist()))
        if len(numbers) == 1:
            return RowMeans(len(lengths), ((numbers[0], None, None),))
        parts, starts = [], lengths.cumsum(0) - lengths
        for number in numbers:
            rows = (lengths == number).nonzero().squeeze(1)
            parts.append((number, (starts[rows, None] + torch.arange(number)).flatten(), rows))
        return RowMeans(len(lengths), tuple(parts))

    def move_to(self, move: Move) -> "RowMeans":
        """Move tensors to the device."""
        parts = tuple((number, _move(places, move), _move(rows, move)) for number, places, rows in self.parts)
        return RowMeans(self.num_rows, parts)

    def __call__(self, vectors: torch.Tensor) -> torch.Tensor:
        """Average; (F, E) to (R, E)."""
        means = vectors.new_empty((self.num_rows, vectors.shape[1])) if len(self.parts) > 1 else vectors
        for number, places, rows in self.parts:
            own = vectors if places is None else vectors[places]
            mean = own if number == 1 else own.view(-1, number, own.shape[1]).mean(1)
            means = mean if rows is None else means.index_copy(0, rows, mean)
        return means


class Layout(Protocol):
    """How the elements of a batch's rows lie in the tensors that layers work on.

    It is made from lengths on the host and moved to the device before the layers run, so that the layers never
    synchronise host and device.
    """

    @property
    def means(self) -> RowMeans:
        """Means over the pooled vectors of each row."""

    @property
    def elements_per_row(self) -> torch.Tensor:
        """Number of activation elements of each row, int64 (R,), on the CPU."""

    def move_to(self, move: Move) -> "Layout":
        """Move what the layers need to their device."""

    def pad(self, values: torch.Tensor) -> torch.Tensor:
        """Convert packed elements, (N, ...), to what layers work on."""

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Convert back to packed elements."""


@dataclass(frozen=True)
class Frames:
    """Layout of images: an element is a frame with all its tokens, so nothing is padded."""

    elements_per_row: torch.Tensor
    means: RowMeans

    @staticmethod
    def of(lengths: torch.Tensor) -> "Frames":
        """Lay out rows by their number of frames, int64 (R,), on the CPU."""
        return Frames(lengths, RowMeans.of(lengths))

    def move_to(self, move: Move) -> "Frames":
        """Move what the layers need to their device."""
        return replace(self, means=self.means.move_to(move))

    def pad(self, values: torch.Tensor) -> torch.Tensor:
        """Return the frames unchanged."""
        return values

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Return the frames unchanged."""
        return x


@dataclass(frozen=True)
class Clips(Frames):
    """Layout of clips of one number of frames: a vector is of a clip."""

    num_frames: int

    @staticmethod
    def of(lengths: torch.Tensor) -> "Clips":
        """Lay out rows by their number of frames, int64 (R,), on the CPU; raises a ModelError for several numbers."""
        found = sorted(set(lengths.tolist()))
        if len(found) != 1:
            raise ModelError(f"pixels: clips of {found} frames are not computed together; group rows by their frames")
        return Clips(lengths, RowMeans.of(torch.ones_like(lengths)), found[0])


@dataclass(frozen=True)
class Padding:
    """Layout of captions computed together, in a rectangle `shape` (R, T) as wide as the longest.

    `lengths` int64 (R,) on the CPU and `num_tokens` on the device count each caption's tokens. `is_token` is bool (R,
    T); `places` int64 (N,) has each token's position in the flattened rectangle, None without padding; `mask` bool (R,
    1, T, T) says whether a token may be attended to, None where all may.
    """

    lengths: torch.Tensor
    shape: tuple[int, int]
    num_tokens: torch.Tensor
    is_token: torch.Tensor
    places: torch.Tensor | None
    mask: torch.Tensor | None

    @staticmethod
    def of(lengths: torch.Tensor) -> "Padding":
        """Lay out captions of these lengths, int64 (R,), on the CPU, all at least 1."""
        longest = int(lengths.max())
        shape, is_token = (len(lengths), longest), torch.arange(longest) < lengths[:, None]
        if int(lengths.min()) == longest:
            return Padding(lengths, shape, lengths, is_token, None, None)
        places = is_token.flatten().nonzero().squeeze(1)
        return Padding(lengths, shape, lengths, is_token, places, _attention_mask(is_token))

    def move_to(self, move: Move) -> "Padding":
        """Move what the layers need to their device."""
        is_token = move(self.is_token)
        return Padding(
            lengths=self.lengths,
            shape=self.shape,
            num_tokens=move(self.num_tokens),
            is_token=is_token,
            places=_move(self.places, move),
            mask=None if self.mask is None else _attention_mask(is_token),
        )

    @property
    def means(self) -> RowMeans:
        """One vector per caption."""
        return RowMeans(self.shape[0], ((1, None, None),))

    @property
    def elements_per_row(self) -> torch.Tensor:
        """One element per token."""
        return self.lengths

    def pad(self, values: torch.Tensor, fill: int = 0) -> torch.Tensor:
        """Convert packed (N, ...) to padded (R, T, ...)."""
        if self.places is None:
            return values.view(*self.shape, *values.shape[1:])
        padded = values.new_full((self.shape[0] * self.shape[1], *values.shape[1:]), fill)
        padded[self.places] = values
        return padded.view(*self.shape, *values.shape[1:])

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Convert padded (R, T, ...) to packed (N, ...)."""
        flat = x.flatten(0, 1)
        return flat if self.places is None else flat[self.places]


def _attention_mask(is_token: torch.Tensor) -> torch.Tensor:
    """Make the mask by which every token attends to all of its caption, (R, 1, T, T)."""
    return is_token[:, None, None, :].expand(-1, 1, is_token.shape[1], -1)


@dataclass(frozen=True)
class EndedCaptions:
    """Layout of captions with one more element at the end of each: `captions` (R, T) has only them.

    `states` is a rectangle (R, T + 1), in which the last element stands behind the padding of its caption.
    """

    captions: Padding
    states: Padding

    @staticmethod
    def of(lengths: torch.Tensor) -> "EndedCaptions":
        """Lay out captions by their lengths without that element, int64 (R,), on the CPU, all at least 1."""
        captions = Padding.of(lengths)
        is_state = nn.functional.pad(captions.is_token, (0, 1), value=True)
        places = None if captions.places is None else is_state.flatten().nonzero().squeeze(1)
        shape = (captions.shape[0], captions.shape[1] + 1)
        return EndedCaptions(captions, Padding(lengths + 1, shape, lengths + 1, is_state, places, None))

    def move_to(self, move: Move) -> "EndedCaptions":
        """Move what the layers need to their device."""
        return EndedCaptions(self.captions.move_to(move), self.states.move_to(move))

    @property
    def means(self) -> RowMeans:
        """One vector per caption."""
        return self.states.means

    @property
    def elements_per_row(self) -> torch.Tensor:
        """One element per token, and one more."""
        return self.states.lengths

    def pad(self, values: torch.Tensor) -> torch.Tensor:
        """Convert packed (N, ...) to padded (R, T + 1, ...)."""
        return self.states.pad(values)

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Convert padded (R, T + 1, ...) to packed (N, ...)."""
        return self.states.pack(x)


@dataclass(frozen=True)
class PatchGrids:
    """Layout of images that keep their proportions, in a rectangle as wide as the longest.

    `grids` int64 (R, 3), on the CPU, count frames, patch rows and patch columns; `means` are over a row's frames;
    `patches` lay out patches without class and register tokens, `tokens` all tokens. `sizes` are the patch rows and
    columns that occur, `counts` the numbers of frames that have them, `by_size` int64 (F,) these frames' positions.
    """

    grids: torch.Tensor
    means: RowMeans
    patches: Padding
    tokens: Padding
    sizes: list[list[int]]
    counts: list[int]
    by_size: torch.Tensor

    @staticmethod
    def of(grids: torch.Tensor, num_prefix_tokens: int) -> "PatchGrids":
        """Lay out frames by their grids, (R, 3), on the CPU, with so many class and register tokens per frame."""
        grids = grids.long()
        frames = grids[:, 1:].repeat_interleave(grids[:, 0], 0)
        patches = Padding.of(frames.prod(1))
        tokens = Padding.of(frames.prod(1) + num_prefix_tokens) if num_prefix_tokens else patches
        sizes, number, counts = torch.unique(frames, dim=0, return_inverse=True, return_counts=True)
        means, by_size = RowMeans.of(grids[:, 0]), number.argsort()
        return PatchGrids(grids, means, patches, tokens, sizes.tolist(), counts.tolist(), by_size)

    def move_to(self, move: Move) -> "PatchGrids":
        """Move what the layers need to their device."""
        patches = self.patches.move_to(move)
        tokens = patches if self.tokens is self.patches else self.tokens.move_to(move)
        return replace(self, means=self.means.move_to(move), patches=patches, tokens=tokens, by_size=move(self.by_size))

    @property
    def patches_per_row(self) -> torch.Tensor:
        """Patches of all frames of each row, int64 (R,)."""
        return self.grids.prod(1)

    @property
    def elements_per_row(self) -> torch.Tensor:
        """Tokens of all frames of each row."""
        return self.patches_per_row + self.grids[:, 0] * (self.tokens.lengths[:1] - self.patches.lengths[:1])

    def pad(self, values: torch.Tensor) -> torch.Tensor:
        """Convert packed tokens (N, ...) to padded (F, L, ...)."""
        return self.tokens.pad(values)

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Convert padded (F, L, ...) to packed (N, ...)."""
        return self.tokens.pack(x)

    def add_positions(self, x_FND: torch.Tensor, positions: Callable[[int, int], torch.Tensor]) -> None:
        """Add to the patches of each frame what `positions` has for its rows and columns, (1, N, D); in-place."""
        for (rows, columns), frames in zip(self.sizes, torch.split(self.by_size, self.counts), strict=True):
            own_FND = positions(rows, columns).expand(len(frames), -1, -1)
            x_FND[:, : rows * columns].index_add_(0, frames, own_FND)

    def coordinates(self) -> torch.Tensor:
        """Compute row and column of each patch, int64 (F, N, 2), on the CPU; 0 for padding."""
        frames = self.grids[:, 1:].repeat_interleave(self.grids[:, 0], 0)
        number, columns = torch.arange(self.patches.shape[1]), frames[:, 1:]
        places = torch.stack([number // columns, number % columns], -1)
        return places * (number < self.patches.lengths[:, None])[..., None]

    @property
    def is_patch(self) -> torch.Tensor | None:
        """Whether each position holds a patch, bool (F, N); None where all do."""
        return None if self.patches.places is None else self.patches.is_token

    def added_mask(self, x_FLD: torch.Tensor) -> torch.Tensor | None:
        """Make the term added to attention scores, (F, 1, L, L): the lowest number at padding; None without."""
        if self.tokens.places is None:
            return None
        is_token_F11L = self.tokens.is_token[:, None, None]
        mask = torch.zeros_like(is_token_F11L, dtype=x_FLD.dtype)
        mask.masked_fill_(~is_token_F11L, torch.finfo(x_FLD.dtype).min)
        return mask.expand(-1, -1, x_FLD.shape[1], -1)


class Normalise(nn.Module):
    """Normalises uint8 [0, 255] pixels, channels first, in float32 before the cast to the compute dtype."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, preprocess: PreprocessConfig) -> None:
        super().__init__()
        # Made on the CPU even while everything else is built on the meta device: the weight files don't hold them.
        shape = (1, 3, 1, 1)
        self.register_buffer("mean", torch.tensor(preprocess.mean, device="cpu").view(shape), persistent=False)
        self.register_buffer("std", torch.tensor(preprocess.std, device="cpu").view(shape), persistent=False)

    def forward(self, pixels_FHWC: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Scale to [0, 1], subtract the mean, divide by the deviation; (F, H, W, 3) to (F, 3, H, W).

        Patches, (N, 3 for each pixel), keep their order.
        """
        if pixels_FHWC.ndim == 2:
            values = pixels_FHWC.to(self.mean.device).float().view(pixels_FHWC.shape[0], -1, 3)
            values.div_(255).sub_(self.mean.flatten()).div_(self.std.flatten())
            return values.flatten(1).to(dtype)
        pixels = pixels_FHWC.to(self.mean.device).permute(0, 3, 1, 2).contiguous().float()
        return pixels.div_(255).sub_(self.mean).div_(self.std).to(dtype)


def check_pixels(pixels_FHWC: torch.Tensor, size_px: int) -> None:
    """Raise a ModelError unless the pixels are uint8 (F, H, W, 3): square RGB images of the model's size."""
    if pixels_FHWC.dtype != torch.uint8 or tuple(pixels_FHWC.shape[1:]) != (size_px, size_px, 3):
        raise ModelError(
            f"pixels: found {pixels_FHWC.dtype} {list(pixels_FHWC.shape)}, the model takes torch.uint8 "
            f"[F, {size_px}, {size_px}, 3]; decode to the model folder's preprocess.image_size"
        )


def check_patches(patches: torch.Tensor, side_px: int) -> None:
    """Raise a ModelError unless patches are uint8 (N, 3 values a pixel), of the model's patch size."""
    num_values = 3 * side_px**2
    if patches.dtype != torch.uint8 or tuple(patches.shape[1:]) != (num_values,):
        raise ModelError(
            f"pixels: found {patches.dtype} {list(patches.shape)}, the model takes torch.uint8 "
            f"[N, {num_values}], patches of {side_px} px; decode with the model folder's preprocess"
        )


def check_tokens(ids_N: torch.Tensor, lengths: torch.Tensor, num_vocabulary: int, max_tokens: int) -> None:
    """Raise a ModelError if a token id, int32 (N,), is outside the vocabulary, or a caption is too long."""
    longest = int(lengths.max())
    if longest > max_tokens:
        raise ModelError(
            f"token ids: a caption of {longest} tokens, the model takes {max_tokens}; "
            "cut captions to the model folder's preprocess.max_caption_tokens"
        )
    if not 0 <= int(ids_N.min()) <= int(ids_N.max()) < num_vocabulary:
        raise ModelError(
            f"token ids: found {int(ids_N.min())} to {int(ids_N.max())}, the vocabulary is [0, {num_vocabulary}); "
            "use the model folder's own tokenizer.json"
        )
