"""transformers' Qwen3-VL as an embedding model: one tower for pictures, texts, and both.

A picture goes through vision blocks, a merger that makes one token of each square of patches, and then the decoder
layers that texts go through; three vision blocks also feed the first decoder layers (DeepStack). The vision tower's
layers are all of these, in this order; those of the decoder are the text tower's own, and a shard holds them once.

Legend: `F` pictures (frames) of all rows, `N` patches, `M` squares of patches, `R` captions, `L` tokens, `V` width of
the vision blocks, `D` width of the decoder. Source: transformers 5.23, `Qwen3VLModel.forward`, whose steps these
methods follow; the pooling is that of Qwen3-VL-Embedding's own script.
"""

from __future__ import annotations

from importlib import import_module
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from shards.clips import SECONDS
from shards.file_schema import require_multiple
from shards.model_errors import ModelError
from shards.ranges import LayerRange
from shards.towers.base import (
    CLIP,
    OneTowerImport,
    Part,
    Rows,
    Shape,
    Shapes,
    TowerFlops,
    attention_flops,
    linear_shapes,
    norm_shapes,
)
from shards.towers.decoder_text import DecoderTextTower
from shards.towers.from_transformers import check_settings, one_side
from shards.towers.text_encoder import TextActivation
from shards.towers.tower_kinds import TextTower, VisionTower

if TYPE_CHECKING:
    import torch

    from shards.activations import TowerState
    from shards.picture_layout import PictureTokens

CHANNELS = 3
MAX_CAPTION_TOKENS = 8192
"""Longest text of the embedding model's own script; the decoder's positions go far beyond."""
ROPE_THETA = 10000.0  # of the vision blocks' rotary positions


class Qwen3VlTextTower(DecoderTextTower):
    """The decoder; a caption's vector is its last token's."""

    label = "Qwen3-VL decoder"
    library_class = "Qwen3VLTextModel"

    family: Literal["qwen3_vl_text"] = "qwen3_vl_text"
    vocab_size: int = Field(151936, ge=1)
    hidden_size: int = Field(2048, ge=1)
    num_hidden_layers: int = Field(28, ge=1, description="layers")
    num_attention_heads: int = Field(16, ge=1)
    num_key_value_heads: int = Field(8, ge=1, description="heads of keys and values, each for several of queries")
    head_dim: int = Field(128, ge=2, multiple_of=2, description="width of one head")
    intermediate_size: int = Field(6144, ge=1, description="width of the gated MLP")
    hidden_act: TextActivation = "silu"
    max_position_embeddings: int = Field(8192, ge=1, description="longest caption, in tokens")
    rms_norm_eps: float = Field(1e-6, gt=0)
    rope_theta: float = Field(5e6, gt=0, description="base of rotary positions")
    mrope_section: tuple[int, int, int] = Field(
        (24, 20, 20), description="frequencies of time, rows and columns in rotary positions"
    )
    pad_token_id: int = Field(151643, ge=0)
    pool: Literal["last"] = Field("last", description="of the tokens")

    @model_validator(mode="after")
    def _is_decoder(self) -> Self:
        require_multiple(
            "num_attention_heads", self.num_attention_heads, "num_key_value_heads", self.num_key_value_heads
        )
        if sum(self.mrope_section) != self.head_dim // 2:
            raise ValueError(f"mrope_section {self.mrope_section} doesn't sum to half of head_dim ({self.head_dim})")
        return self

    def block_shapes(self) -> Shapes:
        """Return the shapes of a layer."""
        width, head = self.hidden_size, self.head_dim
        return (
            {"input_layernorm.weight": (width,), "post_attention_layernorm.weight": (width,)}
            | {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
            | self.linear_layer_shapes(self.num_attention_heads * head, self.num_key_value_heads * head)
        )

    def head_shapes(self) -> Shapes:
        """Return the shape of the last norm."""
        return {"norm.weight": (self.hidden_size,)}

    def flops(self, num_tokens: int) -> TowerFlops:
        """Count the operations for one caption; the mask saves none."""
        width, queries = self.hidden_size, self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        products = width * (2 * queries + 2 * keys + 3 * self.intermediate_size)
        return TowerFlops(0, 2 * num_tokens * products + 4 * num_tokens**2 * queries, 0)

    def workspace_values(self, num_tokens: int) -> int:
        """Count residual, norm, q, k, v, and gate, value and product of a layer's MLP."""
        heads = (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim
        return num_tokens * (2 * self.hidden_size + heads + 3 * self.intermediate_size)

    def library_settings(self) -> dict[str, Any]:
        """Return the settings of transformers' configuration, by its names."""
        own = self.model_dump(exclude={"family", "pool", "rope_theta", "mrope_section"})
        rope = {"rope_type": "default", "rope_theta": self.rope_theta, "mrope_interleaved": True}
        return own | {"rope_parameters": rope | {"mrope_section": list(self.mrope_section)}, "use_cache": False}

    def run(self, module: Any, layers: LayerRange, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run layers in order; a token attends to those before it."""
        import torch

        from shards.picture_layout import causal_mask

        places = torch.arange(x_FLD.shape[1], device=x_FLD.device).expand(3, 1, -1)
        positions, mask = module.rotary_emb(x_FLD, places), causal_mask(layout)
        for layer in range(layers.start, layers.stop):
            x_FLD = module.layers[layer](x_FLD, position_embeddings=positions, attention_mask=mask)
        return x_FLD

    def pool_tokens(self, module: Any, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run the last norm on the last token of each caption, in float32; (R, L, D) to (R, D)."""
        last: torch.Tensor = module.norm(super().pool_tokens(module, x_FLD, layout))
        return last


class Qwen3VlTower(VisionTower):
    """Vision blocks, merger and decoder; a picture's vector is the last token's of a conversation that holds it."""

    label = "Qwen3-VL"
    library: ClassVar[tuple[str, str, str]] = ("qwen3_vl", "Qwen3VL", "Qwen3VLVisionModel")
    """transformers' package, what its classes begin with, and the class of the vision blocks."""
    layer_prefix = "blocks."
    depth_field = "depth"
    lookup_prefixes = ("pos_embed.",)
    takes_text = True

    family: Literal["qwen3_vl"] = "qwen3_vl"
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

    def front_shapes(self) -> Shapes:
        """Return the shapes of the patches' convolution and the position table."""
        side, width = self.patch_size, self.hidden_size
        return {
            "patch_embed.proj.weight": (width, CHANNELS, self.temporal_patch_size, side, side),
            "patch_embed.proj.bias": (width,),
            "pos_embed.weight": (self.num_position_embeddings, width),
        }

    def block_shapes(self) -> Shapes:
        """Return the shapes of a vision block."""
        width = self.hidden_size
        return (
            norm_shapes("norm1", width)
            | norm_shapes("norm2", width)
            | linear_shapes("attn.qkv", width, 3 * width)
            | linear_shapes("attn.proj", width, width)
            | linear_shapes("mlp.linear_fc1", width, self.intermediate_size)
            | linear_shapes("mlp.linear_fc2", self.intermediate_size, width)
        )

    def head_shapes(self) -> Shapes:
        """Return nothing: the last norm is the decoder's."""
        return {}

    def _merger_shapes(self, name: str, norm_width: int) -> Shapes:
        width = self.square_width
        return (
            norm_shapes(f"{name}.norm", norm_width)
            | linear_shapes(f"{name}.linear_fc1", width, width)
            | linear_shapes(f"{name}.linear_fc2", width, self.dim)
        )

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

    def part_of(self, name: str) -> Part:
        """Return the part of the tower that a tensor belongs to; mergers are layers."""
        return "front" if name.startswith(("patch_embed.", "pos_embed.")) else "layers"

    def _layer_flops(self) -> list[float]:
        """Count the operations of each layer for one image."""
        squares = self.max_patches // self.spatial_merge_size**2
        merger = 2 * squares * self.square_width * (self.square_width + self.dim)
        blocks = [
            self._block_flops(layer) + merger * (layer in self.deepstack_visual_indexes) for layer in range(self.depth)
        ]
        return [*blocks, merger, *[self.decoder.flops(self.decoder_tokens).layer] * self.decoder.num_layers]

    def _block_flops(self, layer: int) -> float:
        """Count the operations of a vision block."""
        del layer
        return attention_flops(self.max_patches, self.hidden_size, self.intermediate_size)

    @property
    def layer_shares(self) -> tuple[float, ...]:
        """Operations of each layer relative to their mean."""
        flops = self._layer_flops()
        return tuple(each * len(flops) / sum(flops) for each in flops)

    @property
    def kinds_of_layers(self) -> tuple[tuple[int, int], ...]:
        """The first of the vision blocks, the merger, the first decoder layer that gets nothing from vision blocks."""
        plain = min(len(self.deepstack_visual_indexes), self.decoder.num_layers - 1)
        return ((0, self.depth), (self.depth, 1), (self.first_decoder_layer + plain, self.decoder.num_layers))

    def flops(self, num_tokens: int) -> TowerFlops:
        """Count the operations for one image; those of a layer are the mean."""
        del num_tokens
        flops, pixels = self._layer_flops(), self.temporal_patch_size * self.patch_values
        return TowerFlops(2 * self.max_patches * pixels * self.hidden_size, sum(flops) / len(flops), 0)

    def workspace_values(self, num_tokens: int) -> int:
        """Count what a vision block or a decoder layer holds, whichever is more."""
        del num_tokens
        block = self.max_patches * (5 * self.hidden_size + 2 * self.intermediate_size)
        return max(block, self.decoder.workspace_values(self.decoder_tokens))

    def _settings(self) -> dict[str, Any]:
        """Return the settings of transformers' vision configuration."""
        excluded = {"family", "min_patches", "max_patches", "ids_before", "ids_between", "ids_after", "decoder"}
        return self.model_dump(exclude=excluded) | {"in_channels": CHANNELS, "out_hidden_size": self.dim}

    def build(self) -> Any:
        """Build vision blocks and mergers; `join` gives them the decoder."""
        from shards.compat import deferred_compiler

        with deferred_compiler():
            from transformers.initialization import no_init_weights

            vision_class = getattr(self._library_module(), self.library[2])
        with no_init_weights():
            return vision_class(vision_class.config_class(**self._settings(), attn_implementation="sdpa"))

    def _library_module(self) -> Any:
        package = self.library[0]
        return import_module(f"transformers.models.{package}.modeling_{package}")

    def join(self, module: Any, decoder: Any) -> None:
        """Let the module use the text tower's, without its weights becoming this module's own."""
        vars(module)["decoder"] = decoder

    def prune(self, module: Any, layers: LayerRange) -> None:
        """Remove all modules that a shard with these layers doesn't own; the others keep their names."""
        from torch import nn

        for layer in range(self.depth):
            if not layers.start <= layer < layers.stop:
                module.blocks[layer] = nn.Identity()
                if layer in self.deepstack_visual_indexes:
                    number = self.deepstack_visual_indexes.index(layer)
                    module.deepstack_merger_list[number] = nn.Identity()
        if not layers.start <= self.depth < layers.stop:
            module.merger = None
        if not layers.holds_front():
            module.patch_embed = module.pos_embed = None

    def fill_buffers(self, module: Any, device: torch.device) -> None:
        """Fill the frequencies of the rotary positions, which every vision block needs."""
        import torch

        with torch.device(device):
            module.rotary_pos_emb = type(module.rotary_pos_emb)(module.config)

    def layer_modules(self, module: Any) -> Any:
        """Return the module itself: its linear layers are in blocks and mergers alone."""
        return module

    def layout(self, lengths: torch.Tensor, grids: torch.Tensor | None = None) -> PictureTokens:
        """Lay out images for all layers."""
        return self._layout(lengths, grids, None)

    def _layout(self, lengths: torch.Tensor, grids: torch.Tensor | None, text: TowerState | None) -> PictureTokens:
        from shards.activations import TowerState

        return self.arrange(TowerState(lengths, lengths, grids, text), LayerRange(0, self.num_layers))

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
        return PictureTokens.of(rows, side, self.temporal_patch_size, template, inputs, is_inside=inside)

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

    def front(self, module: Any, values: torch.Tensor, layout: Any) -> torch.Tensor:
        """Embed patches and positions; (N, values) to packed squares."""
        from transformers.vision_utils import get_vision_interpolation_indices_and_weights

        places, weights = get_vision_interpolation_indices_and_weights(
            layout.grids,
            num_grid_per_side=module.num_grid_per_side,
            mode=module.interpolation_mode,
            align_corners=module.interpolation_align_corners,
            spatial_merge_size=self.spatial_merge_size,
        )
        places, weights = places.to(values.device), weights.to(values.device)
        x_NV: torch.Tensor = module.patch_embed(self._in_time(values, layout))
        positions_NV = (module.pos_embed(places) * weights[:, :, None]).sum(1)
        placed: torch.Tensor = x_NV + positions_NV.to(x_NV.dtype)
        return placed.view(-1, self.square_width)

    def _in_time(self, values: torch.Tensor, layout: Any) -> torch.Tensor:
        """Convert patches (N, rows x columns x 3) to the library's: (N, 3 x times x rows x columns)."""
        side = self.patch_size
        patches = values.view(-1, side, side, CHANNELS).permute(0, 3, 1, 2)
        if layout.times is None:
            return patches[:, :, None].expand(-1, -1, self.temporal_patch_size, -1, -1).flatten(1)
        return patches[layout.times].transpose(1, 2).flatten(1)

    def run(self, module: Any, layers: LayerRange, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run layers in order, from the packed values in front of the first to those behind the last."""
        x, inputs = self._unpack(x_FLD, layers.start, layout)
        if layers.start <= self.depth:
            x, inputs = self._run_vision(module, layers, x, inputs, layout)
        if layers.stop > self.first_decoder_layer:
            x, inputs = self._run_decoder(module.decoder, self.shared_layers(layers), x, inputs, layout)
        return self._pack(x, inputs, layers.stop, layout)

    def _run_vision(
        self, module: Any, layers: LayerRange, x_NV: torch.Tensor, inputs: list[torch.Tensor], layout: Any
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run vision blocks and merger; (N, V) to (N, V), or behind the merger to (M, D)."""
        from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids

        places = get_vision_position_ids(layout.grids, self.spatial_merge_size).to(x_NV.device)
        # The limits of each picture stay on the host: without flash attention the blocks read them as numbers.
        limits, positions = get_vision_cu_seqlens(layout.grids), module.rotary_pos_emb(x_NV, places)
        for layer in range(layers.start, min(layers.stop, self.depth)):
            x_NV = module.blocks[layer](x_NV, cu_seqlens=limits, position_embeddings=positions)
            if layer in self.deepstack_visual_indexes:
                merge = module.deepstack_merger_list[self.deepstack_visual_indexes.index(layer)]
                inputs = [*inputs, merge(x_NV)]
        return module.merger(x_NV) if layers.stop > self.depth else x_NV, inputs

    def _run_decoder(
        self, decoder: Any, layers: LayerRange, x: torch.Tensor, inputs: list[torch.Tensor], layout: Any
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run decoder layers; in front of the first, squares (M, D) take their places among the tokens, (F, L, D)."""
        from shards.picture_layout import causal_mask

        if layers.start == 0:
            x = self._place_squares(decoder, x, layout)
        mask, positions = causal_mask(layout.tokens), decoder.rotary_emb(x, layout.positions)
        for layer in range(layers.start, layers.stop):
            x = decoder.layers[layer](x, position_embeddings=positions, attention_mask=mask)
            if inputs:
                x = x.flatten(0, 1).index_add(0, layout.picture, inputs[0].to(x.dtype)).view_as(x)
                inputs = inputs[1:]
        return x, inputs

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

    def pool_tokens(self, module: Any, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run the last norm on the last token of each conversation, in float32; packed tokens to (F, D)."""
        last: torch.Tensor = module.decoder.norm(x_FLD[layout.tokens.num_tokens.cumsum(0) - 1].float())
        return last

    def reference(
        self,
        module: Any,
        values: torch.Tensor,
        lengths: torch.Tensor,
        grids: torch.Tensor | None = None,
        text: TowerState | None = None,
    ) -> torch.Tensor:
        """Compute pooled features by transformers' own forward function; `text` has token ids for each row."""
        import torch

        layout = self._layout(lengths, grids, text).move_to(lambda each: each.to(values.device))
        kinds = torch.zeros(layout.tokens.shape, dtype=torch.int32, device=values.device)
        kinds.view(-1)[layout.picture] = 1
        model = self._assemble(module, self._unused_id(layout))
        output = model(
            input_ids=layout.ids.masked_fill(kinds == 1, model.config.image_token_id),
            attention_mask=layout.tokens.is_token.long(),
            position_ids=None if layout.times is None else layout.positions,  # a clip's are known where it is decoded
            pixel_values=self._in_time(values, layout),
            image_grid_thw=layout.grids,
            mm_token_type_ids=kinds,
        )
        rows = torch.arange(len(kinds), device=values.device)
        last: torch.Tensor = output.last_hidden_state[rows, layout.tokens.num_tokens - 1]
        return last

    def _unused_id(self, layout: Any) -> int:
        """Return a token id that stands nowhere in a layout."""
        used = set(layout.ids.flatten().tolist())
        return next(each for each in range(self.decoder.vocab_size) if each not in used)

    def _assemble(self, module: Any, picture_id: int) -> Any:
        """Put this tower's module and the text tower's into transformers' class of the whole model.

        `picture_id` stands where a picture's tokens are.
        """
        import torch
        from transformers.initialization import no_init_weights

        decoder, model_class = (
            self.decoder.library_settings(),
            getattr(self._library_module(), f"{self.library[1]}Model"),
        )
        with torch.device("meta"), no_init_weights():
            config = model_class.config_class(
                vision_config=self._settings(), text_config=decoder, image_token_id=picture_id
            )
            model = model_class(config)
        model.visual, model.language_model = module, module.decoder
        return model


def _read_decoder(theirs: Any, where: Path) -> Qwen3VlTextTower:
    rope = theirs.rope_parameters or {}
    if rope.get("rope_type", "default") != "default" or not rope.get("mrope_section"):
        raise ModelError(
            f"{where}: qwen3_vl: rope_parameters = {rope}; only 'default' with mrope_section can be imported"
        )
    own = {"family", "pool", "rope_theta", "mrope_section", "pad_token_id", "max_position_embeddings"}
    return check_settings(
        Qwen3VlTextTower,
        where,
        theirs,
        {"attention_bias": False},
        **{key: getattr(theirs, key) for key in Qwen3VlTextTower.model_fields if key not in own},
        max_position_embeddings=min(theirs.max_position_embeddings, MAX_CAPTION_TOKENS),
        rope_theta=rope["rope_theta"],
        mrope_section=tuple(rope["mrope_section"]),
        pad_token_id=theirs.pad_token_id or 0,  # only padding has this id, and it is masked
    )


def _read(theirs: Any, where: Path) -> Qwen3VlTower:
    decoder, vision = _read_decoder(theirs.text_config, where), theirs.vision_config
    keys = ["depth", "hidden_size", "num_heads", "intermediate_size", "hidden_act"]
    keys += ["spatial_merge_size", "num_position_embeddings"]
    rope = vision.rope_parameters or {}
    if rope.get("rope_theta", ROPE_THETA) != ROPE_THETA:
        raise ModelError(
            f"{where}: qwen3_vl: vision_config.rope_parameters = {rope}; only {ROPE_THETA} can be imported"
        )
    return check_settings(
        Qwen3VlTower,
        where,
        vision,
        {"in_channels": CHANNELS, "out_hidden_size": decoder.dim},
        **{key: getattr(vision, key) for key in keys},
        patch_size=one_side(vision.patch_size, "vision_config.patch_size", where),
        temporal_patch_size=one_side(vision.temporal_patch_size, "vision_config.temporal_patch_size", where),
        deepstack_visual_indexes=tuple(vision.deepstack_visual_indexes),
        decoder=decoder,
    )


ONE_TOWERS = {
    "qwen3_vl": OneTowerImport(
        "Qwen3VLConfig",
        _read,
        {"vision": "visual.", "text": "language_model."},
        ignored=("lm_head.",),
        video_processor="Qwen3VLVideoProcessor",
        clip_frame=f"<{SECONDS} seconds>{CLIP}",
        clip_shares_pixels=True,
    )
}
TOWERS = (Qwen3VlTower, Qwen3VlTextTower)
