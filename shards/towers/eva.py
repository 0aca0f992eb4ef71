"""timm's Eva: vision transformers with rotary positions, such as EVA-02, DINOv3 and Perception Encoder.

Legend: `F` images (frames), `H, W` sides in px, `L` tokens of one image, `D` width. Source: timm 1.0.31,
`Eva.forward_features` and `Eva.forward_head`, whose steps these methods follow.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from shards.compat import with_positions
from shards.file_schema import require_multiple
from shards.model_errors import ModelError
from shards.ranges import LayerRange
from shards.towers.base import Shapes, linear_shapes, norm_shapes
from shards.towers.timm_tower import TimmVisionTower, known_options

if TYPE_CHECKING:
    import torch


class EvaTower(TimmVisionTower):
    """An Eva as timm builds it. Every range of layers recomputes the rotary positions: they don't depend on images."""

    label = "EVA"
    kernels_per_layer = 28

    family: Literal["eva"] = "eva"
    attention: Literal["eva", "rope"] = Field("eva", description="timm attn_type; in eva, keys have no bias")
    qkv_fused: bool = Field(True, description="queries, keys and values in one layer")
    post_norm: bool = Field(False, description="norms after attention and MLP instead of before them")
    rope: Literal["none", "cat", "dinov3"] = Field("cat", description="timm rope_type of rotary positions")
    rope_temperature: float = Field(10000.0, gt=0)
    rope_rotate_half: bool = Field(False, description="rotate halves of a head instead of neighbours")
    rope_grid_offset: float = 0.0
    rope_grid_indexing: Literal["ij", "xy"] = "ij"
    rope_ref_side: int | None = Field(
        None, ge=1, description="side in patches of the grid that positions are scaled to; timm ref_feat_shape"
    )
    attn_pool_num_heads: int | None = Field(None, ge=1, description='heads of pool "map"; none: num_heads')
    attn_pool_mlp_ratio: float | None = Field(None, gt=0, description='mlp_ratio of pool "map"; none: mlp_ratio')

    @model_validator(mode="after")
    def _buildable(self) -> Self:
        if self.pool == "map":
            require_multiple("width", self.width, "attn_pool_num_heads", self.attn_pool_num_heads or self.num_heads)
        if self.rope != "none" and self.width // self.num_heads % 4:
            raise ValueError(
                f"width / num_heads is {self.width // self.num_heads}; rotary positions take a multiple of 4"
            )
        # timm chooses the class of a gated MLP by its norm.
        expected = "swiglu" if self.scale_mlp_norm else "swiglu_packed"
        if self.mlp not in ("mlp", expected) and (self.scale_mlp_norm or self.post_norm):
            raise ValueError(f"mlp {self.mlp!r} with scale_mlp_norm or post_norm; write {expected!r}")
        if self.post_norm and (self.qk_norm or self.init_values is not None):
            raise ValueError("post_norm goes with neither qk_norm nor init_values; leave them out")
        return self

    @property
    def pool_mlp_width(self) -> int:
        """Hidden width of the MLP of attention pooling."""
        return int(self.width * (self.attn_pool_mlp_ratio or self.mlp_ratio))

    def block_shapes(self) -> Shapes:
        """Return the shapes of a block."""
        width = self.width
        scales: Shapes = {} if self.init_values is None else {"gamma_1": (width,), "gamma_2": (width,)}
        return (
            norm_shapes("norm1", width)
            | self._qkv_shapes()
            | self.attention_norm_shapes()
            | linear_shapes("attn.proj", width, width)
            | norm_shapes("norm2", width)
            | self.mlp_shapes()
            | scales
        )

    def _qkv_shapes(self) -> Shapes:
        width, is_eva = self.width, self.attention == "eva"
        if self.qkv_fused:
            shapes = linear_shapes("attn.qkv", width, 3 * width, bias=self.qkv_bias and not is_eva)
            biases: Shapes = {"attn.q_bias": (width,), "attn.v_bias": (width,)}
            return shapes | (biases if self.qkv_bias and is_eva else {})
        return (
            linear_shapes("attn.q_proj", width, width, bias=self.qkv_bias)
            | linear_shapes("attn.k_proj", width, width, bias=self.qkv_bias and not is_eva)
            | linear_shapes("attn.v_proj", width, width, bias=self.qkv_bias)
        )

    def fresh_value(self, name: str) -> float | None:
        """Return the initial value of LayerScale, and of biases whose names don't identify them as such."""
        return 0.0 if name.endswith((".q_bias", ".v_bias")) else super().fresh_value(name)

    def build(self) -> Any:
        """Build the whole tower without its head, which `ProjectionHead` provides."""
        from shards.compat import deferred_compiler

        with deferred_compiler():
            from timm.layers import LayerNorm
            from timm.models import eva

        # Initial weights are pointless, as all are loaded; on the meta device, they would import torch's compiler.
        bare_class: Any = type("Eva", (eva.Eva,), {"init_weights": lambda *arguments, **settings: None})
        return bare_class(
            img_size=self.image_size,
            patch_size=self.patch_size,
            num_classes=0,
            global_pool=self.pool,
            embed_dim=self.width,
            depth=self.depth,
            num_heads=self.num_heads,
            qkv_bias=self.qkv_bias,
            qkv_fused=self.qkv_fused,
            **known_options(eva.Eva, {"qk_norm": self.qk_norm}, {"qk_norm": False}),  # from timm 1.0.30 on
            mlp_ratio=self.mlp_ratio,
            swiglu_mlp=self.mlp != "mlp",
            swiglu_align_to=int(self.mlp == "swiglu"),  # to a multiple of 1: timm uses this class for any value but 0
            scale_mlp=self.scale_mlp_norm,
            scale_attn_inner=self.scale_attn_norm,
            attn_type=self.attention,
            norm_layer=partial(LayerNorm, eps=self.norm_eps),
            init_values=self.init_values,
            class_token=self.class_token,
            num_reg_tokens=self.num_reg_tokens,
            no_embed_class=self.no_embed_class,
            **self._position_options(),
            use_post_norm=self.post_norm,
            use_pre_transformer_norm=self.pre_norm,
            use_post_transformer_norm=self.final_norm and not self.fc_norm,
            use_fc_norm=self.final_norm and self.fc_norm,
            attn_pool_num_heads=self.attn_pool_num_heads,
            attn_pool_mlp_ratio=self.attn_pool_mlp_ratio,
        )

    def _position_options(self) -> dict[str, Any]:
        return {
            "use_abs_pos_emb": self.pos_embed == "learn",
            "use_rot_pos_emb": self.rope != "none",
            "rope_type": self.rope,
            "rope_grid_offset": self.rope_grid_offset,
            "rope_grid_indexing": self.rope_grid_indexing,
            "rope_temperature": self.rope_temperature,
            "rope_rotate_half": self.rope_rotate_half,
            "ref_feat_shape": self.rope_ref_side,
        }

    def fill_buffers(self, module: Any, device: torch.device) -> None:
        """Fill the table of rotary positions, and the keys' bias, which is zero."""
        import torch
        from torch import nn

        if module.rope is not None:
            module.rope.to_empty(device=device).init_non_persistent_buffers()
        for block in module.blocks:
            attention: Any = getattr(block, "attn", None)
            if getattr(attention, "k_bias", None) is not None:
                attention.k_bias = torch.zeros_like(attention.q_bias, requires_grad=False)
                # If joined to the product, the bias would bypass a layer with int8 weights.
                attention.qkv_bias_separate = not isinstance(attention.qkv, nn.Linear)

    def front(self, module: Any, values: torch.Tensor, layout: Any) -> torch.Tensor:
        """Embed patches, class and register tokens, and absolute positions; (F, 3, H, W) to (F, L, D)."""
        del layout
        normed: torch.Tensor = module.norm_pre(with_positions(module, module.patch_embed(values)))
        return normed

    def run(self, module: Any, layers: LayerRange, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run blocks with the whole grid's positions; (F, L, D) to (F, L, D). Patch dropout raises a ModelError."""
        del layout
        if self.rope != "none" and x_FLD.shape[1] != self.num_tokens:
            raise ModelError(
                f"patch_dropout: {x_FLD.shape[1]} of {self.num_tokens} tokens, but rotary positions take them all; "
                "write patch_dropout = 0"
            )
        rope = None if module.rope is None else module.rope.get_embed()
        for layer in range(layers.start, layers.stop):
            x_FLD = module.blocks[layer](x_FLD, rope=rope)
        return x_FLD


TOWERS = (EvaTower,)
