"""Layouts of a batch's inputs inside a tower's layers, and the checks of what enters.

Legend: `F` frames, `H, W` sides in px, `R` captions, `T` tokens of the longest one, `N` tokens of all captions.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from shards.config import PreprocessConfig
from shards.errors import ModelError


class Layout(Protocol):
    """How the elements of a batch's rows lie in the tensors that layers work on."""

    @property
    def vectors_per_row(self) -> torch.Tensor:
        """Number of pooled vectors of each row, int64 (R,), on the CPU: they are averaged."""

    @property
    def elements_per_row(self) -> torch.Tensor:
        """Number of elements of an activation of each row, int64 (R,), on the CPU."""

    def pad(self, values: torch.Tensor) -> torch.Tensor:
        """Convert elements one after the other, (N, ...), to what layers work on."""

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Convert back."""


@dataclass(frozen=True)
class Frames:
    """Layout of images: an element is a frame with all its tokens, so nothing is padded.

    Attributes:
        vectors_per_row: int64 (R,), on the CPU: frames of each row.
    """

    vectors_per_row: torch.Tensor

    @property
    def elements_per_row(self) -> torch.Tensor:
        """One element for each frame."""
        return self.vectors_per_row

    def pad(self, values: torch.Tensor) -> torch.Tensor:
        """Return the frames as they are."""
        return values

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Return the frames as they are."""
        return x


@dataclass(frozen=True)
class Padding:
    """Layout of captions that are computed together, in a rectangle of the longest one's width.

    Attributes:
        lengths: int64 (R,), on the CPU: tokens of each caption.
        places: int64 (N,), position of each token in the flattened rectangle; None without any padding.
        mask: bool (R, 1, T, T), whether a token may be attended to; None where all may.
    """

    lengths: torch.Tensor
    places: torch.Tensor | None
    mask: torch.Tensor | None

    @staticmethod
    def of(lengths: torch.Tensor, device: torch.device) -> "Padding":
        """Lay out captions of these lengths, all 1 or more.

        Args:
            lengths: int64 (R,), on the CPU.
            device: device of the captions.
        """
        longest = int(lengths.max())
        if int(lengths.min()) == longest:
            return Padding(lengths, None, None)
        is_token = torch.arange(longest) < lengths[:, None]
        places = is_token.flatten().nonzero().squeeze(1)
        mask = is_token.to(device)[:, None, None, :].expand(-1, 1, longest, -1)
        return Padding(lengths, places.to(device), mask)

    @property
    def shape(self) -> tuple[int, int]:
        """Number of captions, tokens of the longest: (R, T)."""
        return len(self.lengths), int(self.lengths.max())

    @property
    def vectors_per_row(self) -> torch.Tensor:
        """One vector for each caption."""
        return torch.ones_like(self.lengths)

    @property
    def elements_per_row(self) -> torch.Tensor:
        """One element for each token."""
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

    def is_token(self, device: torch.device) -> torch.Tensor:
        """Whether a place of the rectangle holds a token; bool (R, T)."""
        return (torch.arange(self.shape[1]) < self.lengths[:, None]).to(device)


@dataclass(frozen=True)
class PatchGrids:
    """Layout of images that keep their own proportions, in a rectangle of the longest one's width.

    Attributes:
        grids: int64 (R, 3), on the CPU: frames, patch rows and patch columns of each row.
        patches: layout of the frames' patches, without class and register tokens.
        tokens: layout of all of the frames' tokens.
    """

    grids: torch.Tensor
    patches: Padding
    tokens: Padding

    @staticmethod
    def of(grids: torch.Tensor, num_prefix_tokens: int, device: torch.device) -> "PatchGrids":
        """Lay out the frames of these grids.

        Args:
            grids: integers (R, 3), on the CPU.
            num_prefix_tokens: class and register tokens of a frame.
            device: device of the layers.
        """
        grids = grids.long()
        lengths = grids[:, 1:].prod(1).repeat_interleave(grids[:, 0])
        patches = Padding.of(lengths, device)
        tokens = Padding.of(lengths + num_prefix_tokens, device) if num_prefix_tokens else patches
        return PatchGrids(grids, patches, tokens)

    @property
    def vectors_per_row(self) -> torch.Tensor:
        """Frames of each row."""
        return self.grids[:, 0]

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

    def coordinates(self) -> torch.Tensor:
        """Compute row and column of each patch, int64 (F, N, 2), on the CPU; those of padding are 0."""
        frames = self.grids[:, 1:].repeat_interleave(self.grids[:, 0], 0)
        number, columns = torch.arange(self.patches.shape[1]), frames[:, 1:]
        places = torch.stack([number // columns, number % columns], -1)
        return places * (number < self.patches.lengths[:, None])[..., None]

    def is_patch(self, device: torch.device) -> torch.Tensor | None:
        """Whether a place holds a patch; bool (F, N). None where all do."""
        return None if self.patches.places is None else self.patches.is_token(device)

    def added_mask(self, x_FLD: torch.Tensor) -> torch.Tensor | None:
        """Make what is added to the scores of attention, (F, 1, L, L): the least number at padding; None without any.

        Args:
            x_FLD: the tokens, whose dtype and device it has.
        """
        if self.tokens.places is None:
            return None
        is_token_F11L = self.tokens.is_token(x_FLD.device)[:, None, None]
        mask = torch.zeros_like(is_token_F11L, dtype=x_FLD.dtype)
        mask.masked_fill_(~is_token_F11L, torch.finfo(x_FLD.dtype).min)
        return mask.expand(-1, -1, x_FLD.shape[1], -1)


class Normalise(nn.Module):
    """Normalisation of uint8 [0, 255] pixels, channels first, in float32 before the cast to the compute dtype."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, preprocess: PreprocessConfig) -> None:
        super().__init__()
        # Made on the CPU even while all else is built on the meta device: they aren't in the weight files.
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
    """Check the pixels, uint8 (F, H, W, 3).

    Raises:
        ModelError: this is no uint8 tensor of square RGB images of the model's size.
    """
    if pixels_FHWC.dtype != torch.uint8 or tuple(pixels_FHWC.shape[1:]) != (size_px, size_px, 3):
        raise ModelError(
            f"pixels: found {pixels_FHWC.dtype} {list(pixels_FHWC.shape)}, the model takes torch.uint8 "
            f"[F, {size_px}, {size_px}, 3]; decode to the model folder's preprocess.image_size"
        )


def check_tokens(ids_N: torch.Tensor, lengths: torch.Tensor, num_vocabulary: int, max_tokens: int) -> None:
    """Check token ids.

    Args:
        ids_N: int32 (N,), token ids of all captions.
        lengths: int64 (R,), tokens of each caption.
        num_vocabulary: size of the embedding table.
        max_tokens: longest caption that the tower takes.

    Raises:
        ModelError: an id is outside the vocabulary, or a caption is too long.
    """
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
