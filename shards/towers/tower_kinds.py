"""The two kinds of towers: for images and for captions."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Self

from shards.ranges import LayerRange
from shards.towers.base import Rows, Shape, Tower

if TYPE_CHECKING:
    import torch

    from shards.layouts import Layout, Padding


class VisionTower(Tower):
    """A tower for images."""

    is_whole: ClassVar[bool] = False
    """Whether it is one layer, as it has none of one width: a stage holds all of it."""
    takes_text: ClassVar[bool] = False
    """Whether an image may come with a text, in one sequence."""
    prompts_pictures: ClassVar[bool] = True
    """Whether the sequence that an image is in begins with the caption's prompt."""

    @property
    @abstractmethod
    def side_px(self) -> int:
        """Side of the square image, px."""

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Number of tokens of one image inside the layers: `L`."""

    @property
    @abstractmethod
    def num_prefix_tokens(self) -> int:
        """Number of class and register tokens, in front of the patches."""

    @property
    def patch_px(self) -> int | None:
        """Side of a patch, px, if images keep their proportions; None if all are squares of `side_px`."""
        return None

    @property
    def clip_frames(self) -> int | None:
        """Number of frames of a clip, if a row's vector is of all its frames at once; None if each frame has one."""
        return None

    @property
    def patch_values(self) -> int:
        """Number of values of one patch, 3 for each pixel, if images keep their proportions."""
        return 3 * (self.patch_px or 0) ** 2

    @property
    def merge_size(self) -> int:
        """Side of the squares of patches that become one token; both sides of an image are whole squares."""
        return 1

    @property
    def fewest_patches(self) -> int:
        """Number of patches that a smaller image is enlarged to; 0 where only the budget gives the size."""
        return 0

    @property
    def shared_decoder(self) -> TextTower | None:
        """The text tower, if images pass through its layers behind those of this tower; None for two towers."""
        return None

    @property
    def num_end_tokens(self) -> int:
        """Number of tokens that the tokeniser puts behind a caption, and that end a picture's conversation as well."""
        return 0

    def shared_layers(self, layers: LayerRange) -> LayerRange:
        """Return the layers of the text tower among a range of layers."""
        del layers
        return LayerRange(0, 0)

    def join(self, module: Any, decoder: Any) -> None:
        """Let the module of this tower use that of the text tower, whose weights it shares; in-place."""

    def at_patches(self, num_patches: int) -> Self:
        """Copy the tower for images of so many patches; unchanged if all its images have the same number."""
        del num_patches
        return self

    def tokens_in(self, num_tokens: int) -> int:
        """Return the tokens of one image; all images have the same number."""
        del num_tokens
        return self.num_tokens

    def input_bytes(self, num_tokens: int) -> int:
        """Return the bytes of one image's pixels."""
        del num_tokens
        if self.patch_px is not None:
            return (self.num_tokens - self.num_prefix_tokens) * self.patch_values
        return 3 * self.side_px**2

    def input_layout(self) -> tuple[torch.dtype, Shape]:
        """Return dtype and shape of a frame, or of a patch if images keep their proportions."""
        import torch

        if self.patch_px is not None:
            return torch.uint8, (self.patch_values,)
        return torch.uint8, (self.side_px, self.side_px, 3)

    def activation_shape(self, layer: int = 0) -> Shape:
        """Return the shape of a frame's tokens, (L, D)."""
        del layer
        return (self.num_tokens, self.dim)

    def layout(self, lengths: torch.Tensor, grids: torch.Tensor | None = None) -> Layout:
        """Lay out frames, each its own rectangle."""
        from shards.layouts import Frames

        del grids
        return Frames.of(lengths)

    def tokens_per_sequence(self, rows: Rows) -> torch.Tensor | None:
        """Return None: all images have the same number of tokens."""
        del rows
        return None

    def sample_lengths(self, num_rows: int, num_tokens: int) -> torch.Tensor:
        """Return rows of one frame each."""
        import torch

        del num_tokens
        return torch.ones(num_rows, dtype=torch.int64)

    def sample_input(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return random pixels."""
        import torch

        return torch.randint(0, 256, (int(lengths.sum()), *self.input_layout()[1])).byte()

    def check_input(self, values: torch.Tensor, lengths: torch.Tensor) -> None:
        """Raise a ModelError unless pixels are uint8 (F, H, W, 3), of the model's size, or patches (N, 3 a pixel)."""
        from shards.layouts import check_patches, check_pixels

        del lengths
        if self.patch_px is not None:
            check_patches(values, self.patch_px)
        else:
            check_pixels(values, self.side_px)

    def prepare_export(self, module: Any) -> None:
        """Replace what exporters don't know, only for images; in-place."""

    def pixel_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Choose the dtype of normalised pixels by the compute dtype."""
        return dtype

    def set_dtype(self, module: Any, dtype: torch.dtype) -> None:
        """Set the output dtype of a front that computes in float32."""


class TextTower(Tower):
    """A tower for captions."""

    @property
    @abstractmethod
    def max_tokens(self) -> int:
        """Longest caption, in tokens."""

    @property
    @abstractmethod
    def num_vocabulary(self) -> int:
        """Size of the embedding table's vocabulary."""

    @property
    def end_id(self) -> int | None:
        """Id of the token that ends a caption: nothing after the first one counts; None if everything counts."""
        return None

    @property
    def has_fixed_length(self) -> bool:
        """Whether all captions are padded to one length, with padding that is attended to like any other token."""
        return False

    @property
    def needs_special_tokens(self) -> bool:
        """Whether the tokeniser must add its own tokens, so that a caption without known words has one."""
        return True

    @property
    @abstractmethod
    def padding_id(self) -> int:
        """Token id that captions are padded with."""

    def tokens_in(self, num_tokens: int) -> int:
        """Return the tokens of one caption."""
        return num_tokens

    def input_bytes(self, num_tokens: int) -> int:
        """Return the bytes of one caption's token ids, int32."""
        return 4 * num_tokens

    def input_layout(self) -> tuple[torch.dtype, Shape]:
        """Return dtype and shape of a token id."""
        import torch

        return torch.int32, ()

    def activation_shape(self, layer: int = 0) -> Shape:
        """Return the shape of a token, (D,)."""
        del layer
        return (self.dim,)

    def layout(self, lengths: torch.Tensor, grids: torch.Tensor | None = None) -> Padding:
        """Lay out captions in a rectangle as wide as the longest."""
        from shards.layouts import Padding

        del grids
        return Padding.of(lengths)

    def tokens_per_sequence(self, rows: Rows) -> torch.Tensor | None:
        """Count the tokens of each caption; None if padding makes all the same length."""
        return None if self.has_fixed_length else rows.lengths

    def sample_lengths(self, num_rows: int, num_tokens: int) -> torch.Tensor:
        """Return lengths from half to one and a half times the mean, or as far apart as the longest caption allows."""
        import torch

        mean = min(num_tokens, self.max_tokens)
        # Multiples of the golden ratio spread evenly for any number of rows.
        places = (torch.arange(num_rows) * 0.618034 + 0.5) % 1 - 0.5
        return (mean + places * min(mean, 2 * (self.max_tokens - mean))).round().long().clamp(min=1)

    def sample_input(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return random token ids."""
        import torch

        return torch.zeros(int(lengths.sum()), dtype=torch.int32)

    def check_input(self, values: torch.Tensor, lengths: torch.Tensor) -> None:
        """Raise a ModelError if an id, int32 (N,), is outside the vocabulary or a caption is too long."""
        from shards.layouts import check_tokens

        check_tokens(values, lengths, self.num_vocabulary, self.max_tokens)
