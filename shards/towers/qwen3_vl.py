"""transformers' Qwen3-VL as an embedding model: one tower for pictures, texts, and both.

A picture goes through vision blocks, a merger that makes one token of each square of patches, and then the decoder
layers that texts go through; three vision blocks also feed the first decoder layers (DeepStack). The vision tower's
layers are all of these, in this order; those of the decoder are the text tower's own, and a shard holds them once.

Legend: `F` pictures (frames) of all rows, `N` patches, `M` squares of patches, `R` captions, `L` tokens, `V` width of
the vision blocks, `D` width of the decoder. Source: transformers 5.23, `Qwen3VLModel.forward`, whose steps these
methods follow; the pooling is that of Qwen3-VL-Embedding's own script.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from shards.clip_sequence import SECONDS
from shards.model_errors import ModelError
from shards.ranges import LayerRange
from shards.towers.base import (
    CLIP,
    OneTowerImport,
    Part,
    Rows,
    Shapes,
    attention_flops,
    linear_shapes,
    norm_shapes,
)
from shards.towers.from_transformers import check_settings, one_side
from shards.towers.picture_decoder import PictureDecoderTower, make_empty
from shards.towers.qwen3_vl_text import Qwen3VlTextTower, read_decoder

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from shards.layouts import Move

CHANNELS = 3
ROPE_THETA = 10000.0  # of the vision blocks' rotary positions


@dataclass(frozen=True)
class PatchPlaces:
    """Where patches lie in their pictures.

    Attributes:
        places: int64 (N, 2), row and column of each.
        limits: int32 (T + 1,), on the host, where those of each of T frames begin, and the last ones end: without flash
            attention the blocks read them as numbers.
        table: entries of the position table, int64 (N, 4), and their weights, float32 (N, 4); None behind the front.
    """

    places: torch.Tensor
    limits: NDArray[np.int32]
    table: tuple[torch.Tensor, torch.Tensor] | None

    @classmethod
    def of(cls, grids: torch.Tensor, merge: int, **others: Any) -> Self:
        """Find the places of patches in squares of `merge` x `merge`; `others` are the other fields."""
        from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids

        return cls(get_vision_position_ids(grids, merge), get_vision_cu_seqlens(grids).numpy(), **others)

    def move_to(self, move: Move) -> Self:
        """Move what the blocks need to their device."""
        table = self.table and (move(self.table[0]), move(self.table[1]))
        return replace(self, places=move(self.places), table=table)


class Qwen3VlTower(PictureDecoderTower):
    """Vision blocks, merger and decoder; a picture's vector is the last token's of a conversation that holds it."""

    label = "Qwen3-VL"
    kernels_per_layer = 45
    library: ClassVar[tuple[str, str, str]] = ("qwen3_vl", "Qwen3VL", "Qwen3VLVisionModel")
    """transformers' package, what its classes begin with, and the class of the vision blocks."""
    layer_prefix = "blocks."
    lookup_prefixes = ("pos_embed.",)

    family: Literal["qwen3_vl"] = "qwen3_vl"

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

    def _merger_shapes(self, name: str, norm_width: int) -> Shapes:
        width = self.square_width
        return (
            norm_shapes(f"{name}.norm", norm_width)
            | linear_shapes(f"{name}.linear_fc1", width, width)
            | linear_shapes(f"{name}.linear_fc2", width, self.dim)
        )

    def part_of(self, name: str) -> Part:
        """Return the part of the tower that a tensor belongs to; mergers are layers."""
        return "front" if name.startswith(("patch_embed.", "pos_embed.")) else "layers"

    def layer_flops(self, num_tokens: int) -> list[float]:
        """Count the operations of each layer for one image."""
        del num_tokens
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
    def kinds_of_layers(self) -> tuple[tuple[int, int], ...]:
        """The first of the vision blocks, the merger, the first decoder layer that gets nothing from vision blocks."""
        plain = min(len(self.deepstack_visual_indexes), self.decoder.num_layers - 1)
        return ((0, self.depth), (self.depth, 1), (self.first_decoder_layer + plain, self.decoder.num_layers))

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

    def fill_buffers(self, module: Any, device: torch.device) -> None:
        """Fill the frequencies of the rotary positions, which every vision block needs."""
        import torch

        with torch.device(device):
            module.rotary_pos_emb = type(module.rotary_pos_emb)(module.config)

    def _lay_out_patches(self, grids: torch.Tensor, layers: LayerRange) -> PatchPlaces:
        """Find the places of patches, in front of the blocks in the position table, too."""
        from transformers.vision_utils import get_vision_interpolation_indices_and_weights

        side, table = isqrt(self.num_position_embeddings), None
        if layers.holds_front():
            table = get_vision_interpolation_indices_and_weights(
                grids, side, mode="bilinear", align_corners=True, spatial_merge_size=self.spatial_merge_size
            )
        return PatchPlaces.of(grids, self.spatial_merge_size, table=table)

    def front(self, module: Any, values: torch.Tensor, layout: Any) -> torch.Tensor:
        """Embed patches and positions; (N, values) to packed squares."""
        entries, weights = layout.patches.table
        x_NV: torch.Tensor = module.patch_embed(self._in_time(values, layout))
        positions_NV = (module.pos_embed(entries) * weights[:, :, None]).sum(1)
        placed: torch.Tensor = x_NV + positions_NV.to(x_NV.dtype)
        return placed.view(-1, self.square_width)

    def _in_time(self, values: torch.Tensor, layout: Any) -> torch.Tensor:
        """Convert patches (N, rows x columns x 3) to the library's: (N, 3 x times x rows x columns)."""
        side = self.patch_size
        patches = values.view(-1, side, side, CHANNELS).permute(0, 3, 1, 2)
        if layout.times is None:
            return patches[:, :, None].expand(-1, -1, self.temporal_patch_size, -1, -1).flatten(1)
        return patches[layout.times].transpose(1, 2).flatten(1)

    def _run_vision(
        self, module: Any, layers: LayerRange, x_NV: torch.Tensor, inputs: list[torch.Tensor], layout: Any
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run vision blocks and merger; (N, V) to (N, V), or behind the merger to (M, D)."""
        limits, positions = layout.patches.limits, module.rotary_pos_emb(x_NV, layout.patches.places)
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

    def pool_tokens(self, module: Any, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run the last norm on the last token of each conversation, in float32; packed tokens to (F, D)."""
        last: torch.Tensor = module.decoder.norm(x_FLD[layout.tokens.num_tokens.cumsum(0) - 1].float())
        return last

    def reference(self, module: Any, rows: Rows) -> torch.Tensor:
        """Compute pooled features by transformers' own forward function."""
        import torch

        whole = self.arrange(rows, LayerRange(0, self.num_layers))
        layout = whole.move_to(lambda each: each.to(rows.values.device))
        kinds = torch.zeros(layout.tokens.shape, dtype=torch.int32, device=rows.values.device)
        kinds.view(-1)[layout.picture] = 1
        model = self._assemble(module, self._unused_id(layout))
        output = model(
            input_ids=layout.ids.masked_fill(kinds == 1, model.config.image_token_id),
            attention_mask=layout.tokens.is_token.long(),
            position_ids=None if layout.times is None else layout.positions,  # a clip's are known where it is decoded
            pixel_values=self._in_time(rows.values, layout),
            image_grid_thw=layout.grids,
            mm_token_type_ids=kinds,
        )
        every = torch.arange(len(kinds), device=kinds.device)
        last: torch.Tensor = output.last_hidden_state[every, layout.tokens.num_tokens - 1]
        return last

    def _assemble(self, module: Any, picture_id: int) -> Any:
        """Put this tower's module and the text tower's into transformers' class of the whole model.

        `picture_id` stands where a picture's tokens are.
        """
        model = make_empty(
            getattr(self._library_module(), f"{self.library[1]}Model"),
            vision_config=self._settings(),
            text_config=self.decoder.library_settings(),
            image_token_id=picture_id,
        )
        model.visual, model.language_model = module, module.decoder
        return model


def check_vision_rope(vision: Any, model_type: str, where: Path) -> None:
    """Raise a ModelError if the rotary positions of vision blocks have another base."""
    rope = vision.rope_parameters or {}
    if rope.get("rope_theta", ROPE_THETA) != ROPE_THETA:
        raise ModelError(
            f"{where}: {model_type}: vision_config.rope_parameters = {rope}; only {ROPE_THETA} can be imported"
        )


def _read(theirs: Any, where: Path) -> Qwen3VlTower:
    decoder = read_decoder(Qwen3VlTextTower, theirs.text_config, where, {"attention_bias": False})
    vision = theirs.vision_config
    keys = ["depth", "hidden_size", "num_heads", "intermediate_size", "hidden_act"]
    keys += ["spatial_merge_size", "num_position_embeddings"]
    check_vision_rope(vision, "qwen3_vl", where)
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
