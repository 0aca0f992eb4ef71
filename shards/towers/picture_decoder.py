"""Towers in which pictures pass through vision blocks, a merger, and then the layers of texts: decoders with eyes.

A vision tower's layers are all of these, in this order; those of the decoder are the text tower's own, and a shard
holds them once. Vision blocks may also feed the first decoder layers (DeepStack).

Legend: `F` pictures and clips of all rows, `N` patches, `M` squares of patches, `L` tokens, `V` width of the vision
blocks, `D` width of the decoder.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from math import isqrt
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, model_validator

from shards.file_schema import require_multiple
from shards.model_errors import ModelError
from shards.ranges import LayerRange
from shards.towers.base import Rows, Shape, Shapes, TowerFlops
from shards.towers.qwen3_vl_text import Qwen3VlTextTower
from shards.towers.text_encoder import TextActivation
from shards.towers.tower_kinds import TextTower, VisionTower

if TYPE_CHECKING:
    import torch

    from shards.picture_layout import PatchLayout, PictureTokens


class PictureDecoderTower(VisionTower):
    """Vision blocks, merger and decoder; a picture's vector is of the tokens of all that it is in."""

    depth_field = "depth"
    takes_text = True

    family: str
    depth: int = Field(24, ge=1, description="vision blocks")
    hidden_size: int = Field(1024, ge=1, description="width of the vision blocks")
    num_heads: int = Field(16, ge=1, description="heads of a vision block")
    intermediate_size: int = Field(4096, ge=1, description="width of a vision block's MLP")
    hidden_act: TextActivation = Field("gelu_pytorch_tanh", description="of a vision block's MLP")
    patch_size: int = Field(16, ge=1, description="side of a patch, px")
    temporal_patch_size: int = Field(2, ge=1, description="times that a picture stands in a patch, as in a still video")
    spatial_merge_size: int = Field(2, ge=1, description="side of the squares of patches that become one token")
    num_position_embeddings: int = Field(2304, ge=1, description="positions of the square table")
    deepstack_visual_indexes: tuple[int, ...] = Field(
        (5, 11, 17), description="vision blocks whose output is added behind the first decoder layers"
    )
    min_patches: int = Field(16, ge=1, description="a smaller image is enlarged to so many patches")
    max_patches: int = Field(7200, ge=1, description="budget: a larger image is reduced to at most so many patches")
    ids_before: tuple[int, ...] = Field((), description="tokens of the conversation in front of a picture")
    ids_between: tuple[int, ...] = Field((), description="tokens right behind a picture, in front of its text")
    ids_after: tuple[int, ...] = Field((), description="tokens that end the conversation")
    decoder: Qwen3VlTextTower = Field(default_factory=Qwen3VlTextTower, description="equal to the text tower")

    @model_validator(mode="after")
    def _buildable(self) -> Self:
        require_multiple("hidden_size", self.hidden_size, "num_heads", self.num_heads)
        indexes = self.deepstack_visual_indexes
        if list(indexes) != sorted(set(indexes)) or any(not 0 <= each < self.depth for each in indexes):
            raise ValueError(
                f"deepstack_visual_indexes {indexes}: expected ascending numbers of the {self.depth} blocks"
            )
        if len(indexes) > self.decoder.num_layers:
            raise ValueError(
                f"deepstack_visual_indexes {indexes} feed a decoder layer each, and it has {self.decoder.num_layers}"
            )
        if isqrt(self.num_position_embeddings) ** 2 != self.num_position_embeddings:
            raise ValueError(f"num_position_embeddings {self.num_position_embeddings} is no square")
        if self.min_patches > self.max_patches:
            raise ValueError(f"min_patches ({self.min_patches}) exceeds max_patches ({self.max_patches})")
        if not all(0 <= each < self.decoder.vocab_size for each in self._ids):
            raise ValueError(f"ids_before, ids_between or ids_after exceed the {self.decoder.vocab_size} tokens")
        return self

    @property
    def _ids(self) -> tuple[int, ...]:
        """Token ids of the conversation around a picture."""
        return (*self.ids_before, *self.ids_between, *self.ids_after)

    @property
    def shared_decoder(self) -> TextTower:
        """The text tower."""
        return self.decoder

    @property
    def first_decoder_layer(self) -> int:
        """Number of layers before the decoder's: the vision blocks and the merger."""
        return self.depth + 1

    @property
    def num_layers(self) -> int:
        """Number of layers: vision blocks, merger, decoder layers."""
        return self.first_decoder_layer + self.decoder.num_layers

    def at_depth(self, num_layers: int) -> Self:
        """Copy the tower with fewer decoder layers; at least one of them stays."""
        decoder = self.decoder.at_depth(max(1, num_layers - self.first_decoder_layer))
        return self.model_copy(update={"decoder": decoder})

    @property
    def num_end_tokens(self) -> int:
        """Number of tokens that end the conversation."""
        return len(self.ids_after)

    def shared_layers(self, layers: LayerRange) -> LayerRange:
        """Return the decoder's layers among a range of layers."""
        start, stop = (max(0, each - self.first_decoder_layer) for each in (layers.start, layers.stop))
        return LayerRange(start, stop)

    @property
    def dim(self) -> int:
        """Width of the decoder."""
        return self.decoder.hidden_size

    @property
    def side_px(self) -> int:
        """Side of the square whose patches fit the position table, px."""
        return isqrt(self.num_position_embeddings) * self.patch_size

    @property
    def num_tokens(self) -> int:
        """Number of patches of one image: the budget, which large images use up."""
        return self.max_patches

    @property
    def num_prefix_tokens(self) -> int:
        """Number of class and register tokens: none."""
        return 0

    @property
    def patch_px(self) -> int:
        """Side of a patch, px: images keep their proportions."""
        return self.patch_size

    @property
    def merge_size(self) -> int:
        """Side of the squares of patches that become one token."""
        return self.spatial_merge_size

    @property
    def fewest_patches(self) -> int:
        """Number of patches that a smaller image is enlarged to."""
        return self.min_patches

    @property
    def square_width(self) -> int:
        """Width of a square of patches, in front of the merger."""
        return self.hidden_size * self.spatial_merge_size**2

    @property
    def decoder_tokens(self) -> int:
        """Number of tokens of one image inside the decoder."""
        return self.max_patches // self.spatial_merge_size**2 + len(self._ids)

    def at_patches(self, num_patches: int) -> Self:
        """Copy the tower for images of so many patches, at most its budget."""
        most = min(num_patches, self.max_patches)
        return self.model_copy(update={"max_patches": most, "min_patches": min(most, self.min_patches)})

    def describe(self) -> str:
        """Describe the tower and its sizes."""
        return (
            f"{self.label} {self.depth} vision blocks x {self.hidden_size}, merger, {self.decoder.num_layers} decoder "
            f"layers x {self.dim}, images of {self.min_patches} to {self.max_patches} patches of {self.patch_size} px"
        )

    def num_inputs(self, layer: int) -> int:
        """Count the inputs to decoder layers that an activation in front of a layer carries."""
        if layer <= self.depth:
            return sum(index < layer for index in self.deepstack_visual_indexes)
        return max(0, len(self.deepstack_visual_indexes) - max(0, layer - self.first_decoder_layer))

    def activation_shape(self, layer: int = 0) -> Shape:
        """Return the shape of an element: a square with its inputs to the decoder, or a token or one input, (D,)."""
        if layer > self.first_decoder_layer:
            return (self.dim,)
        width = self.square_width if layer <= self.depth else self.dim
        return (width + self.num_inputs(layer) * self.dim,)

    def values_at(self, layer: int, num_tokens: int) -> int:
        """Return the values of one image's activation in front of a layer."""
        del num_tokens
        squares = self.max_patches // self.spatial_merge_size**2
        if layer <= self.first_decoder_layer:
            return squares * self.activation_shape(layer)[0]
        return (self.decoder_tokens + squares * self.num_inputs(layer)) * self.dim

    def head_shapes(self) -> Shapes:
        """Return nothing: the last norm is the decoder's."""
        return {}

    def shapes(self, layers: LayerRange) -> Shapes:
        """Return the tensor shapes of a range of layers, without those of the decoder."""
        shapes = self.front_shapes() if layers.holds_front() else {}
        for layer in range(layers.start, min(layers.stop, self.depth)):
            shapes |= {self.prefix_of(layer) + name: shape for name, shape in self.block_shapes().items()}
            if layer in self.deepstack_visual_indexes:
                number = self.deepstack_visual_indexes.index(layer)
                shapes |= self._merger_shapes(f"deepstack_merger_list.{number}", self.square_width)
        if layers.start <= self.depth < layers.stop:
            shapes |= self._merger_shapes("merger", self.hidden_size)
        return shapes

    def flops(self, num_tokens: int) -> TowerFlops:
        """Count the operations for one image; those of a layer are the mean."""
        flops, pixels = self.layer_flops(num_tokens), self.temporal_patch_size * self.patch_values
        return TowerFlops(2 * self.max_patches * pixels * self.hidden_size, sum(flops) / len(flops), 0)

    def workspace_values(self, num_tokens: int) -> int:
        """Count what a vision block or a decoder layer holds, whichever is more."""
        del num_tokens
        block = self.max_patches * (5 * self.hidden_size + 2 * self.intermediate_size)
        return max(block, self.decoder.workspace_values(self.decoder_tokens))

    def join(self, module: Any, decoder: Any) -> None:
        """Let the module use the text tower's, without its weights becoming this module's own."""
        vars(module)["decoder"] = decoder

    def layout(self, lengths: torch.Tensor, grids: torch.Tensor | None = None) -> PictureTokens:
        """Lay out images for all layers."""
        from shards.activations import TowerState

        return self.arrange(TowerState(lengths, lengths, grids), LayerRange(0, self.num_layers))

    def arrange(self, rows: Rows, layers: LayerRange) -> PictureTokens:
        """Lay out images, with their texts, for a range of layers; raises a ModelError if grids don't match."""
        from shards.picture_layout import PictureTokens

        if rows.grids is None:
            raise ModelError(f"images of a {self.label} come with their grids of patches, and these have none")
        side, grids = self.spatial_merge_size, rows.grids.long()
        whole = not (grids[:, 1:] % side).any()
        if not whole or (layers.start == 0 and not rows.lengths.equal(grids.prod(1))):
            raise ModelError(
                f"pixels: rows of {rows.lengths.tolist()[:5]} patches, their grids (frames, rows, columns of patches) "
                f"are {grids.tolist()[:5]}, of squares of {side} x {side}; decode with the model folder's preprocess"
            )
        ends = layers.start, layers.stop
        inputs = self.num_inputs(layers.start), self.num_inputs(layers.stop)
        inside = ends[0] > self.first_decoder_layer, ends[1] > self.first_decoder_layer
        template = self.ids_before, self.ids_between, self.ids_after
        layout = PictureTokens.of(rows, side, self.temporal_patch_size, template, inputs, is_inside=inside)
        if layers.start > self.depth:
            return layout
        return replace(layout, patches=self._lay_out_patches(layout.grids, layers))

    def tokens_per_sequence(self, rows: Rows) -> torch.Tensor | None:
        """Count the patches of a picture or clip of each row, int64 (R,); a text's token counts as a square of them."""
        from shards.picture_layout import count_places

        if rows.grids is None:
            return None
        patches = rows.grids[:, 1:].long().prod(1)
        if rows.text is None:
            return patches
        places = count_places(rows.text)
        return patches * places.clamp(min=1) + (rows.text.lengths - places) * self.spatial_merge_size**2

    def sample_lengths(self, num_rows: int, num_tokens: int) -> torch.Tensor:
        """Return the lengths of images that use up the budget."""
        import torch

        del num_tokens
        return self.sample_grids(torch.zeros(num_rows)).long().prod(1)

    def sample_grids(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return grids of whole squares that use up the budget, nearly square."""
        import torch

        unit, squares = self.spatial_merge_size, max(1, self.max_patches // self.spatial_merge_size**2)
        rows = isqrt(squares)
        return torch.tensor([(1, unit * rows, unit * (squares // rows))] * len(lengths)).int()

    def run(self, module: Any, layers: LayerRange, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run layers in order, from the packed values in front of the first to those behind the last."""
        x, inputs = self._unpack(x_FLD, layers.start, layout)
        if layers.start <= self.depth:
            x, inputs = self._run_vision(module, layers, x, inputs, layout)
        if layers.stop > self.first_decoder_layer:
            x, inputs = self._run_decoder(module.decoder, self.shared_layers(layers), x, inputs, layout)
        return self._pack(x, inputs, layers.stop, layout)

    def _place_squares(self, decoder: Any, x_MD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Look up the tokens around pictures, and put squares in their places; (M, D) to (F, L, D)."""
        tokens_FLD: torch.Tensor = decoder.embed_tokens(layout.ids)
        return tokens_FLD.flatten(0, 1).index_copy(0, layout.picture, x_MD.to(tokens_FLD.dtype)).view_as(tokens_FLD)

    def _unpack(self, packed: torch.Tensor, layer: int, layout: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return what a layer works on, and the inputs to decoder layers that are still to come."""
        if layer > self.first_decoder_layer:
            if layout.start is None:
                return layout.tokens.pad(packed), []
            return layout.tokens.pad(packed[layout.start.tokens]), [packed[each] for each in layout.start.inputs]
        width = self.square_width if layer <= self.depth else self.dim
        inputs = [packed[:, start : start + self.dim] for start in range(width, packed.shape[1], self.dim)]
        return packed[:, :width].reshape(-1, self.hidden_size if layer <= self.depth else self.dim), inputs

    def _pack(self, x: torch.Tensor, inputs: list[torch.Tensor], layer: int, layout: Any) -> torch.Tensor:
        """Return the packed values in front of a layer."""
        import torch

        if layer > self.first_decoder_layer:
            tokens: torch.Tensor = layout.tokens.pack(x)
            if layout.stop is None:
                return tokens
            packed = tokens.new_empty((len(tokens) + sum(map(len, inputs)), self.dim))
            packed[layout.stop.tokens] = tokens
            for places, each in zip(layout.stop.inputs, inputs, strict=True):
                packed[places] = each
            return packed
        squares = x.view(-1, self.square_width if layer <= self.depth else self.dim)
        return torch.cat([squares, *inputs], 1) if inputs else squares

    def _unused_id(self, layout: Any) -> int:
        """Return a token id that stands nowhere in a layout."""
        used = set(layout.ids.flatten().tolist())
        return next(each for each in range(self.decoder.vocab_size) if each not in used)

    @abstractmethod
    def _merger_shapes(self, name: str, norm_width: int) -> Shapes:
        """Return the shapes of a merger, whose norm has this width."""

    @abstractmethod
    def _lay_out_patches(self, grids: torch.Tensor, layers: LayerRange) -> PatchLayout:
        """Lay out the patches of pictures and clips, (F, 3), for the vision blocks and the merger, on the host."""

    @abstractmethod
    def _run_vision(
        self, module: Any, layers: LayerRange, x_NV: torch.Tensor, inputs: list[torch.Tensor], layout: Any
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run vision blocks and merger; (N, V) to (N, V), or behind the merger to (M, D)."""

    @abstractmethod
    def _run_decoder(
        self, decoder: Any, layers: LayerRange, x: torch.Tensor, inputs: list[torch.Tensor], layout: Any
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run decoder layers; in front of the first, squares (M, D) take their places among the tokens, (F, L, D)."""


def make_empty(model_class: Any, **settings: Any) -> Any:
    """Make a library's class of a whole model without weights, into which a tower's modules are put."""
    import torch
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        return model_class(model_class.config_class(**settings))
