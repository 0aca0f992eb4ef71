"""Parts that timm's vision transformers share: settings, shapes of tensors, pruning, pooling.

Legend: `F` images (frames), `H, W` sides in px, `L` tokens of one image, `D` width.
Source: timm 1.0.31, `VisionTransformer` and `Eva`: `forward_features` and `forward_head`, whose steps these methods
follow.
"""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from shards.file_schema import require_multiple
from shards.model_errors import ModelError
from shards.towers.base import Rows, Shapes, TowerFlops, attention_flops, linear_shapes, norm_shapes
from shards.towers.tower_kinds import VisionTower

if TYPE_CHECKING:
    import torch

Mlp = Literal["mlp", "swiglu", "swiglu_packed"]


def known_options(kind: type, options: dict[str, Any], unset: dict[str, Any]) -> dict[str, Any]:
    """Drop options that an older timm lacks if their values say what it does; raises a ModelError if one is needed."""
    missing = unset.keys() - signature(kind).parameters.keys()
    for name in sorted(missing):
        if options[name] != unset[name]:
            raise ModelError(
                f"{kind.__name__}: {name} = {options[name]!r} is more than the installed timm has; update it"
            )
    return {name: value for name, value in options.items() if name not in missing}


class TimmVisionTower(VisionTower):
    """A vision transformer as timm builds it."""

    layer_prefix = "blocks."
    depth_field = "depth"
    head_prefixes = ("norm.", "fc_norm.", "attn_pool.")

    image_size: int = Field(224, ge=1, description="side of the square image, px")
    patch_size: int = Field(16, ge=1, description="side of one patch, px; what is left of the image isn't seen")
    width: int = Field(384, ge=1, description="timm embed_dim")
    depth: int = Field(12, ge=1, description="transformer blocks")
    num_heads: int = Field(6, ge=1)
    mlp_ratio: float = Field(4.0, gt=0, description="hidden width of the MLP over width")
    mlp: Mlp = Field("mlp", description="swiglu: gated, with gate and value in two layers; swiglu_packed: in one")
    qkv_bias: bool = True
    qk_norm: bool = Field(False, description="norm of each head's queries and keys")
    scale_attn_norm: bool = Field(False, description="norm in front of the attention's output projection")
    scale_mlp_norm: bool = Field(False, description="norm in front of the MLP's output projection")
    class_token: bool = True
    num_reg_tokens: int = Field(0, ge=0, description="timm reg_tokens")
    pos_embed: Literal["learn", "none"] = Field("learn", description="table of absolute positions")
    no_embed_class: bool = Field(False, description="class and register tokens have no position embedding")
    pre_norm: bool = Field(False, description="norm before the blocks, and no patch bias, as in CLIP")
    final_norm: bool = Field(True, description="norm after the blocks")
    fc_norm: bool = Field(False, description="the final norm comes after pooling")
    init_values: float | None = Field(None, gt=0, description="first value of LayerScale; none: no LayerScale")
    pool: Literal["token", "avg", "avgmax", "max", "map"] = Field("token", description="timm global_pool")
    norm_eps: float = Field(1e-6, gt=0)

    @model_validator(mode="after")
    def _buildable_blocks(self) -> Self:
        if self.patch_size > self.image_size:
            raise ValueError(f"patch_size ({self.patch_size}) exceeds image_size ({self.image_size}); make it smaller")
        require_multiple("width", self.width, "num_heads", self.num_heads)
        if not self.class_token and self.pool == "token":
            raise ValueError('pool "token" needs class_token = true; else write pool "avg"')
        if self.mlp_width < 1:
            raise ValueError(f"mlp_ratio {self.mlp_ratio} leaves the MLP without units; write a larger one")
        return self

    @property
    def grid_side(self) -> int:
        """Number of patches along one side of the image."""
        return self.image_size // self.patch_size

    @property
    def num_patches(self) -> int:
        """Number of patches of one image."""
        return self.grid_side**2

    @property
    def num_prefix_tokens(self) -> int:
        """Number of class and register tokens."""
        return int(self.class_token) + self.num_reg_tokens

    @property
    def num_tokens(self) -> int:
        """Number of tokens of one image inside the blocks: `L`."""
        return self.num_patches + self.num_prefix_tokens

    @property
    def mlp_width(self) -> int:
        """Hidden width of the MLP, rounded as timm rounds it."""
        return int(self.width * self.mlp_ratio)

    @property
    def mlp_units(self) -> int:
        """Width of the input to the MLP's output projection."""
        return self.mlp_width

    @property
    def pool_mlp_width(self) -> int:
        """Hidden width of the MLP of attention pooling."""
        return self.mlp_width

    @property
    def num_layers(self) -> int:
        """Number of transformer blocks."""
        return self.depth

    @property
    def dim(self) -> int:
        """Width of the activations."""
        return self.width

    @property
    def side_px(self) -> int:
        """Side of the square image, px."""
        return self.image_size

    def describe(self) -> str:
        """Describe the tower and its sizes."""
        return f"{self.label} {self.depth} layers x {self.width}, {self.image_size} px in patches of {self.patch_size}"

    def norm_shapes(self, name: str, width: int) -> Shapes:
        """Return the shapes of a norm of the tower's kind."""
        return norm_shapes(name, width)

    def patch_shapes(self) -> Shapes:
        """Return the shapes of the patch embedding, without its bias."""
        return {"patch_embed.proj.weight": (self.width, 3, self.patch_size, self.patch_size)}

    def front_shapes(self) -> Shapes:
        """Return the shapes of patches, class and register tokens, and positions."""
        shapes = self.patch_shapes()
        if self.class_token:
            shapes["cls_token"] = (1, 1, self.width)
        if self.num_reg_tokens:
            shapes["reg_token"] = (1, self.num_reg_tokens, self.width)
        if self.pos_embed == "learn":
            num_positions = self.num_patches if self.no_embed_class else self.num_tokens
            shapes["pos_embed"] = (1, num_positions, self.width)
        # timm omits the patch bias where a norm follows directly.
        last: Shapes = (
            self.norm_shapes("norm_pre", self.width) if self.pre_norm else {"patch_embed.proj.bias": (self.width,)}
        )
        return shapes | last

    def attention_norm_shapes(self) -> Shapes:
        """Return the shapes of the norms inside an attention."""
        head_dim, shapes = self.width // self.num_heads, {}
        if self.qk_norm:
            shapes = self.norm_shapes("attn.q_norm", head_dim) | self.norm_shapes("attn.k_norm", head_dim)
        return shapes | (self.norm_shapes("attn.norm", self.width) if self.scale_attn_norm else {})

    def mlp_shapes(self, *, bias: bool = True) -> Shapes:
        """Return the shapes of a block's MLP, with or without biases."""
        width, units = self.width, self.mlp_units
        if self.mlp == "swiglu":
            shapes = linear_shapes("mlp.fc1_g", width, units, bias=bias)
            shapes |= linear_shapes("mlp.fc1_x", width, units, bias=bias)
        else:
            shapes = linear_shapes("mlp.fc1", width, units * (2 if self.mlp == "swiglu_packed" else 1), bias=bias)
        norm = self.norm_shapes("mlp.norm", units) if self.scale_mlp_norm else {}
        return shapes | norm | linear_shapes("mlp.fc2", units, width, bias=bias)

    def head_shapes(self) -> Shapes:
        """Return the shapes of the last norm, and of attention pooling."""
        shapes = self.norm_shapes("fc_norm" if self.fc_norm else "norm", self.width) if self.final_norm else {}
        return shapes | (self._attention_pool_shapes() if self.pool == "map" else {})

    def _attention_pool_shapes(self) -> Shapes:
        name, width = "attn_pool", self.width
        latent: Shapes = {f"{name}.latent": (1, 1, width)}
        return (
            latent
            | linear_shapes(f"{name}.q", width, width)
            | linear_shapes(f"{name}.kv", width, 2 * width)
            | linear_shapes(f"{name}.proj", width, width)
            | self.norm_shapes(f"{name}.norm", width)
            | linear_shapes(f"{name}.mlp.fc1", width, self.pool_mlp_width)
            | linear_shapes(f"{name}.mlp.fc2", self.pool_mlp_width, width)
        )

    def flops(self, num_tokens: int) -> TowerFlops:
        """Count the operations for one image."""
        del num_tokens
        # A gated MLP has three products where others have two.
        units = self.mlp_units if self.mlp == "mlp" else 3 * self.mlp_units // 2
        return TowerFlops(self.front_flops(), attention_flops(self.num_tokens, self.width, units), self.head_flops())

    def front_flops(self) -> float:
        """Count the operations of the patch embedding: one product of N patches by 3*P*P values."""
        return 2 * self.num_patches * 3 * self.patch_size**2 * self.width

    def head_flops(self) -> float:
        """Count those of a pooler, 2*D*D, or of attention pooling: 4*L*D*D for keys and values, and the rest."""
        if self.pool == "map":
            attention = 4 * self.num_tokens * self.width**2 + 4 * self.num_tokens * self.width + 4 * self.width**2
            return attention + 4 * self.width * self.pool_mlp_width
        return 2 * self.width**2 if self.has_head_pooler else 0

    def workspace_values(self, num_tokens: int) -> int:
        """Count residual, norm, q, k, v, and the hidden width of a layer twice, or three times if it is gated."""
        del num_tokens
        layer = self.num_tokens * (5 * self.width + (2 if self.mlp == "mlp" else 3) * self.mlp_units)
        return max(layer, 3 * self.image_size**2)

    def fresh_value(self, name: str) -> float | None:
        """Return the initial value of LayerScale."""
        return self.init_values if name.rpartition(".")[2].startswith("gamma") else None

    def pool_tokens(self, module: Any, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run timm's last norm and pooling in float32; (F, L, D) to (F, D)."""
        del layout
        # The norm works token by token: if only the class token is kept, the others need no norm.
        x_FLD = x_FLD[:, :1] if self.pool == "token" else x_FLD
        pooled: torch.Tensor = module.forward_head(module.norm(x_FLD.float()), pre_logits=True)
        return pooled

    def reference(self, module: Any, rows: Rows) -> torch.Tensor:
        """Compute pooled features by timm's own forward functions."""
        pooled: torch.Tensor = module.forward_head(module.forward_features(rows.values), pre_logits=True)
        return pooled

    def use_plain_attention(self, module: Any) -> None:
        """Turn off fused attention."""
        for block in module.blocks:
            block.attn.fused_attn = False
        if module.attn_pool is not None:
            module.attn_pool.fused_attn = False
