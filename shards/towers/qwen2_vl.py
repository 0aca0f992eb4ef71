"""transformers' Qwen2-VL and Qwen2.5-VL as embedding models: one tower for pictures, texts, and both.

They are as Qwen3-VL, which came after them, without inputs to early decoder layers and without a table of positions;
most vision blocks of Qwen2.5-VL attend inside windows. Queries, keys and values of their decoders have biases in place
of norms.

Legend: `N` patches, `M` squares of patches, `V` width of the vision blocks. Source: transformers 5.23, `Qwen2VLModel`
and `Qwen2_5_VLModel`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from shards.file_schema import require_multiple
from shards.model_errors import ModelError
from shards.ranges import LayerRange
from shards.towers.base import OneTowerImport, Shapes, linear_shapes, norm_shapes
from shards.towers.from_transformers import check_settings, one_side
from shards.towers.qwen3_vl import CHANNELS, PatchPlaces, Qwen3VlTower, check_vision_rope
from shards.towers.qwen3_vl_text import Qwen3VlTextTower, read_decoder
from shards.towers.text_encoder import TextActivation

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from shards.layouts import Move


class Qwen2VlTextTower(Qwen3VlTextTower):
    """The decoder of Qwen2-VL; a caption's vector is its last token's."""

    label = "Qwen2-VL decoder"
    kernels_per_layer = 38
    library_class = "Qwen2VLTextModel"

    family: Literal["qwen2_vl_text"] = "qwen2_vl_text"  # type: ignore[assignment]
    hidden_size: int = Field(1536, ge=1)
    num_attention_heads: int = Field(12, ge=1)
    num_key_value_heads: int = Field(2, ge=1, description="heads of keys and values, each for several of queries")
    intermediate_size: int = Field(8960, ge=1, description="width of the gated MLP")
    rope_theta: float = Field(1e6, gt=0, description="base of rotary positions")
    mrope_section: tuple[int, int, int] = Field(
        (16, 24, 24), description="frequencies of time, rows and columns in rotary positions"
    )

    @model_validator(mode="after")
    def _has_whole_heads(self) -> Self:
        if self.head_dim * self.num_attention_heads != self.hidden_size:
            raise ValueError(
                f"head_dim ({self.head_dim}) x num_attention_heads ({self.num_attention_heads}) is not hidden_size "
                f"({self.hidden_size})"
            )
        return self

    def block_shapes(self) -> Shapes:
        """Return the shapes of a layer."""
        shapes = super().block_shapes()
        del shapes["self_attn.q_norm.weight"], shapes["self_attn.k_norm.weight"]
        biases = {f"self_attn.{each}_proj.bias": shapes[f"self_attn.{each}_proj.weight"][:1] for each in "qkv"}
        return shapes | biases

    def library_settings(self) -> dict[str, Any]:
        """Return the settings of transformers' configuration, by its names."""
        settings = super().library_settings()
        del settings["head_dim"], settings["rope_parameters"]["mrope_interleaved"]
        return settings


class Qwen25VlTextTower(Qwen2VlTextTower):
    """The decoder of Qwen2.5-VL."""

    label = "Qwen2.5-VL decoder"
    library_class = "Qwen2_5_VLTextModel"

    family: Literal["qwen2_5_vl_text"] = "qwen2_5_vl_text"  # type: ignore[assignment]


class Qwen2VlTower(Qwen3VlTower):
    """Vision blocks, merger and decoder of Qwen2-VL; a picture's vector is the last token's of its conversation."""

    label = "Qwen2-VL"
    kernels_per_layer = 36
    library = ("qwen2_vl", "Qwen2VL", "Qwen2VisionTransformerPretrainedModel")

    num_position_embeddings: ClassVar[int] = 36**2  # type: ignore[misc] # there is no table: any size of images fits
    deepstack_visual_indexes: ClassVar[tuple[int, ...]] = ()  # type: ignore[misc]

    family: Literal["qwen2_vl"] = "qwen2_vl"  # type: ignore[assignment]
    depth: int = Field(32, ge=1, description="vision blocks")
    hidden_size: int = Field(1280, ge=1, description="width of the vision blocks")
    intermediate_size: int = Field(5120, ge=1, description="width of a vision block's MLP")
    hidden_act: TextActivation = Field("quick_gelu", description="of a vision block's MLP")
    patch_size: int = Field(14, ge=1, description="side of a patch, px")
    decoder: Qwen2VlTextTower = Field(default_factory=Qwen2VlTextTower, description="equal to the text tower")

    def front_shapes(self) -> Shapes:
        """Return the shape of the patches' convolution."""
        name = "patch_embed.proj.weight"
        return {name: (self.hidden_size, CHANNELS, self.temporal_patch_size, self.patch_size, self.patch_size)}

    def _norm_shapes(self, name: str) -> Shapes:
        return norm_shapes(name, self.hidden_size)

    def _mlp_shapes(self) -> Shapes:
        width, hidden = self.hidden_size, self.intermediate_size
        return linear_shapes("mlp.fc1", width, hidden) | linear_shapes("mlp.fc2", hidden, width)

    def block_shapes(self) -> Shapes:
        """Return the shapes of a vision block."""
        width = self.hidden_size
        attention = linear_shapes("attn.qkv", width, 3 * width) | linear_shapes("attn.proj", width, width)
        return self._norm_shapes("norm1") | self._norm_shapes("norm2") | attention | self._mlp_shapes()

    def _merger_shapes(self, name: str, norm_width: int) -> Shapes:
        del norm_width
        width = self.square_width
        linears = linear_shapes(f"{name}.mlp.0", width, width) | linear_shapes(f"{name}.mlp.2", width, self.dim)
        return self._norm_shapes(f"{name}.ln_q") | linears

    def _settings(self) -> dict[str, Any]:
        settings = super()._settings()
        del settings["out_hidden_size"]
        ratio = settings.pop("intermediate_size") // self.hidden_size
        return settings | {"hidden_size": self.dim, "embed_dim": self.hidden_size, "mlp_ratio": ratio}

    @model_validator(mode="after")
    def _has_whole_ratio(self) -> Self:
        if type(self) is Qwen2VlTower:
            require_multiple("intermediate_size", self.intermediate_size, "hidden_size", self.hidden_size)
        return self

    def _lay_out_patches(self, grids: torch.Tensor, layers: LayerRange) -> PatchPlaces:
        """Find the places of patches."""
        del layers
        return PatchPlaces.of(grids, self.spatial_merge_size, table=None)

    def front(self, module: Any, values: torch.Tensor, layout: Any) -> torch.Tensor:
        """Embed patches; (N, values) to packed squares."""
        x_NV: torch.Tensor = module.patch_embed(self._in_time(values, layout))
        return x_NV.view(-1, self.square_width)


@dataclass(frozen=True)
class WindowedPatches(PatchPlaces):
    """Where patches lie in their pictures, and in windows.

    `order` int64 (M,) has the squares of patches in the order of windows, and `window_limits` is as `limits`.
    """

    order: torch.Tensor
    window_limits: NDArray[np.int32]

    def move_to(self, move: Move) -> Self:
        """Move what the blocks need to their device."""
        return replace(super().move_to(move), order=move(self.order))


class Qwen25VlTower(Qwen2VlTower):
    """Vision blocks, most of them with windows, merger and decoder of Qwen2.5-VL."""

    label = "Qwen2.5-VL"
    kernels_per_layer = 48
    library = ("qwen2_5_vl", "Qwen2_5_VL", "Qwen2_5_VisionTransformerPretrainedModel")

    family: Literal["qwen2_5_vl"] = "qwen2_5_vl"  # type: ignore[assignment]
    intermediate_size: int = Field(3420, ge=1, description="width of a vision block's MLP")
    hidden_act: TextActivation = Field("silu", description="of a vision block's MLP")
    window_size: int = Field(112, ge=1, description="side of the squares that most vision blocks attend in, px")
    fullatt_block_indexes: tuple[int, ...] = Field(
        (7, 15, 23, 31), description="vision blocks that attend to the whole picture"
    )
    decoder: Qwen25VlTextTower = Field(default_factory=Qwen25VlTextTower, description="equal to the text tower")

    @model_validator(mode="after")
    def _has_windows(self) -> Self:
        require_multiple("window_size", self.window_size, "patch_size", self.patch_size * self.spatial_merge_size)
        if any(not 0 <= each < self.depth for each in self.fullatt_block_indexes):
            raise ValueError(f"fullatt_block_indexes {self.fullatt_block_indexes}: expected numbers below {self.depth}")
        return self

    def _norm_shapes(self, name: str) -> Shapes:
        return {f"{name}.weight": (self.hidden_size,)}

    def _mlp_shapes(self) -> Shapes:
        width, hidden = self.hidden_size, self.intermediate_size
        inner = linear_shapes("mlp.gate_proj", width, hidden) | linear_shapes("mlp.up_proj", width, hidden)
        return inner | linear_shapes("mlp.down_proj", hidden, width)

    def _settings(self) -> dict[str, Any]:
        return Qwen3VlTower._settings(self)

    def _block_flops(self, layer: int) -> float:
        """Count the operations of a vision block: a gated MLP, and scores inside windows where it has them."""
        patches, width = self.max_patches, self.hidden_size
        seen = patches if layer in self.fullatt_block_indexes else (self.window_size // self.patch_size) ** 2
        products = 8 * width**2 + 6 * width * self.intermediate_size
        return patches * (products + 4 * min(seen, patches) * width)

    @property
    def kinds_of_layers(self) -> tuple[tuple[int, int], ...]:
        """The first block with windows, the first without, the merger, the first decoder layer."""
        whole = [layer for layer in range(self.depth) if layer in self.fullatt_block_indexes]
        inside = [layer for layer in range(self.depth) if layer not in whole]
        blocks = tuple((each[0], len(each)) for each in (inside, whole) if each)
        return (*blocks, *super().kinds_of_layers[1:])

    def _lay_out_patches(self, grids: torch.Tensor, layers: LayerRange) -> WindowedPatches:
        """Find the places of patches, and the windows."""
        from transformers.vision_utils import get_vision_window_index

        del layers
        side = self.spatial_merge_size
        order, windows = get_vision_window_index(grids, side, self.window_size, self.patch_size)
        return WindowedPatches.of(grids, side, table=None, order=order, window_limits=windows.numpy())

    def _run_vision(
        self, module: Any, layers: LayerRange, x_NV: torch.Tensor, inputs: list[torch.Tensor], layout: Any
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run blocks and merger in the order of windows; what goes in and out is in the order of squares."""
        patches, order = layout.patches, layout.patches.order
        x_NV = self._reorder(x_NV, order)
        if layers.start < self.depth:
            positions = tuple(self._reorder(each, order) for each in module.rotary_pos_emb(x_NV, patches.places))
            for layer in range(layers.start, min(layers.stop, self.depth)):
                limits = patches.limits if layer in self.fullatt_block_indexes else patches.window_limits
                x_NV = module.blocks[layer](x_NV, cu_seqlens=limits, position_embeddings=positions)
        if layers.stop > self.depth:
            return module.merger(x_NV)[order.argsort()], inputs
        return self._reorder(x_NV, order.argsort()), inputs

    def _reorder(self, x_NV: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """Put squares of patches, (M,), in an order."""
        squares = x_NV.view(len(order), -1, x_NV.shape[-1])
        return squares[order].view_as(x_NV)


def _read_as(family: type[Qwen2VlTower], theirs: Any, where: Path) -> Qwen2VlTower:
    own_code = (getattr(theirs, "auto_map", None) or {}).get("AutoModel")
    if own_code:
        raise ModelError(
            f"{where}: auto_map names code of the repository's own ({own_code}), which writes the conversation around "
            "an item and is never run; write the same by a chat_template.jinja, and leave auto_map out"
        )
    vision = theirs.vision_config
    texts = theirs.text_config
    decoder = read_decoder(
        family.model_fields["decoder"].annotation,  # type: ignore[arg-type]
        texts,
        where,
        {"use_sliding_window": False},
        head_dim=texts.hidden_size // texts.num_attention_heads,
    )
    check_vision_rope(vision, theirs.model_type, where)
    expected: dict[str, object] = {"in_channels": CHANNELS}
    if family is Qwen2VlTower:
        own = {"hidden_size": vision.embed_dim, "intermediate_size": vision.embed_dim * vision.mlp_ratio}
        expected["hidden_size"] = decoder.dim
    else:
        own = {key: getattr(vision, key) for key in ("hidden_size", "intermediate_size", "window_size")}
        own["fullatt_block_indexes"] = tuple(vision.fullatt_block_indexes)
        expected["out_hidden_size"] = decoder.dim
    return check_settings(
        family,
        where,
        vision,
        expected,
        **{key: getattr(vision, key) for key in ("depth", "num_heads", "hidden_act", "spatial_merge_size")},
        **own,
        patch_size=one_side(vision.patch_size, "vision_config.patch_size", where),
        temporal_patch_size=one_side(vision.temporal_patch_size, "vision_config.temporal_patch_size", where),
        decoder=decoder,
    )


def _importer(config_class: str, family: type[Qwen2VlTower]) -> OneTowerImport:
    def read(theirs: Any, where: Path) -> Qwen2VlTower:
        return _read_as(family, theirs, where)

    prefixes = {"vision": "visual.", "text": "language_model."}
    older = {"vision": "visual.", "text": "model."}
    return OneTowerImport(config_class, read, prefixes, ignored=("lm_head.",), older=older)


ONE_TOWERS = {
    "qwen2_vl": _importer("Qwen2VLConfig", Qwen2VlTower),
    "qwen2_5_vl": _importer("Qwen2_5_VLConfig", Qwen25VlTower),
}
TOWERS = (Qwen2VlTower, Qwen2VlTextTower, Qwen25VlTower, Qwen25VlTextTower)
