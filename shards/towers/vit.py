"""timm's VisionTransformer.

Legend: `F` images (frames), `H, W` sides in px, `L` tokens of one image, `D` width.
Source: timm 1.0.31, `VisionTransformer.forward_features` and `forward_head`, whose steps these methods follow.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from shards.ranges import LayerRange
from shards.schema import require_multiple
from shards.towers.base import Shapes, TowerFlops, VisionTower, attention_flops, linear_shapes, norm_shapes

if TYPE_CHECKING:
    import torch


# Factor by which three convolutions of stride 2 shrink an image.
CONV_STEM_STRIDE_PX = 8

VisionActivation = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "silu"]

# Settings that have timm's names.
_TIMM_NAMES = {"depth", "num_heads", "mlp_ratio", "qkv_bias", "init_values", "class_token", "pos_embed"}
_TIMM_NAMES |= {"no_embed_class", "pre_norm", "final_norm", "fc_norm"}


class VitTower(VisionTower):
    """A ViT as timm builds it."""

    label = "ViT"
    layer_prefix = "blocks."
    head_prefixes = ("norm.", "fc_norm.")
    # Rounded to bfloat16, the stem's maps turned an image's vector by 4 degrees, and six layers by a quarter of one.
    float32_prefixes = ("patch_embed.backbone.",)

    family: Literal["vit"] = "vit"
    image_size: int = Field(224, ge=1, description="side of the square image, px")
    patch_size: int = Field(16, ge=1, description="side of one patch, px")
    stem: Literal["patch", "conv"] = Field(
        "patch", description="conv: three 3x3 convolutions of stride 2 (BatchNorm, GELU) before the patches are cut"
    )
    stem_channels: tuple[int, int, int] | None = Field(
        None, description="output channels of the conv stem's convolutions; none: width / 4, width / 2, width"
    )
    stem_blocks: tuple[int, int, int] = Field((0, 0, 0), description="timm residual blocks after each of them")
    width: int = Field(384, ge=1, description="timm embed_dim")
    depth: int = Field(12, ge=1, description="transformer blocks")
    num_heads: int = Field(6, ge=1)
    mlp_ratio: float = Field(4.0, gt=0, description="hidden width of the MLP over width")
    qkv_bias: bool = True
    class_token: bool = True
    num_reg_tokens: int = Field(0, ge=0, description="timm reg_tokens")
    pos_embed: Literal["learn", "none"] = "learn"
    no_embed_class: bool = Field(False, description="class and register tokens have no position embedding")
    pre_norm: bool = Field(False, description="norm before the blocks, and no patch bias, as in CLIP")
    final_norm: bool = Field(True, description="norm after the blocks")
    fc_norm: bool = Field(False, description="the final norm comes after pooling")
    init_values: float | None = Field(None, gt=0, description="first value of LayerScale; none: no LayerScale")
    pool: Literal["token", "avg", "avgmax", "max"] = Field("token", description="timm global_pool")
    pooler: Literal["none", "tanh"] = Field("none", description="dense + tanh on the class token, as in HF's ViTModel")
    norm_eps: float = Field(1e-6, gt=0)
    activation: VisionActivation = "gelu"

    @model_validator(mode="after")
    def _buildable(self) -> Self:
        require_multiple("image_size", self.image_size, "patch_size", self.patch_size)
        require_multiple("width", self.width, "num_heads", self.num_heads)
        if self.stem == "conv":
            require_multiple("patch_size", self.patch_size, "the conv stem's stride", CONV_STEM_STRIDE_PX)
            if self.stem_channels is None:
                require_multiple("width", self.width, "the conv stem's first narrowing", 4)
        elif self.stem_channels is not None or any(self.stem_blocks):
            raise ValueError('stem_channels and stem_blocks belong to stem = "conv"; write that, or leave them out')
        if min((*self.stem_blocks, *(number - 1 for number in self.stem_channels or ()))) < 0:
            raise ValueError(f"stem_channels {self.stem_channels} from 1 up, stem_blocks {self.stem_blocks} from 0 up")
        if not self.class_token and (self.pool == "token" or self.pooler != "none"):
            raise ValueError('pool "token" and a pooler need class_token = true; else write pool "avg"')
        if self.pooler != "none" and self.pool != "token":
            raise ValueError(f'a pooler works on the class token, and pool is "{self.pool}"; write pool "token"')
        if self.mlp_width < 1:
            raise ValueError(f"mlp_ratio {self.mlp_ratio} leaves the MLP without units; write a larger one")
        return self

    @property
    def num_patches(self) -> int:
        """Number of patches of one image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def conv_channels(self) -> tuple[int, int, int]:
        """Output channels of the conv stem's three convolutions."""
        return self.stem_channels or (self.width // 4, self.width // 2, self.width)

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

    @property
    def has_head_pooler(self) -> bool:
        """Whether a dense layer and tanh follow pooling, as in HF's ViTModel."""
        return self.pooler == "tanh"

    def describe(self) -> str:
        """Describe the tower with its sizes."""
        return f"{self.label} {self.depth} layers x {self.width}, {self.image_size} px in patches of {self.patch_size}"

    def front_shapes(self) -> Shapes:
        """Compute the shapes of patches, class and register tokens, positions."""
        shapes = self._patch_shapes()
        if self.class_token:
            shapes["cls_token"] = (1, 1, self.width)
        if self.num_reg_tokens:
            shapes["reg_token"] = (1, self.num_reg_tokens, self.width)
        if self.pos_embed == "learn":
            num_positions = self.num_patches if self.no_embed_class else self.num_tokens
            shapes["pos_embed"] = (1, num_positions, self.width)
        # timm leaves out the patch bias where a norm follows directly.
        last: Shapes = (
            norm_shapes("norm_pre", self.width) if self.pre_norm else {"patch_embed.proj.bias": (self.width,)}
        )
        return shapes | last

    def _patch_shapes(self) -> Shapes:
        if self.stem == "patch":
            return {"patch_embed.proj.weight": (self.width, 3, self.patch_size, self.patch_size)}
        shapes: Shapes = {}
        num_in, layer = 3, 0
        for num_out, num_blocks in zip(self.conv_channels, self.stem_blocks, strict=True):
            name = f"patch_embed.backbone.{layer}"
            shapes |= _conv_shapes(f"{name}.conv", f"{name}.bn", num_in, num_out)
            for block in range(1, num_blocks + 1):
                name = f"patch_embed.backbone.{layer + block}"
                shapes |= _conv_shapes(f"{name}.conv1", f"{name}.bn1", num_out, num_out)
                shapes |= _conv_shapes(f"{name}.conv2", f"{name}.bn2", num_out, num_out)
            num_in, layer = num_out, layer + 1 + num_blocks
        side = self.patch_size // CONV_STEM_STRIDE_PX
        return shapes | {"patch_embed.proj.weight": (self.width, num_in, side, side)}

    def block_shapes(self) -> Shapes:
        """Compute the shapes of a block."""
        width = self.width
        scales: Shapes = {"ls1.gamma": (width,), "ls2.gamma": (width,)} if self.init_values else {}
        return (
            norm_shapes("norm1", width)
            | linear_shapes("attn.qkv", width, 3 * width, bias=self.qkv_bias)
            | linear_shapes("attn.proj", width, width)
            | norm_shapes("norm2", width)
            | linear_shapes("mlp.fc1", width, self.mlp_width)
            | linear_shapes("mlp.fc2", self.mlp_width, width)
            | scales
        )

    def head_shapes(self) -> Shapes:
        """Compute the shapes of the last norm."""
        return norm_shapes("fc_norm" if self.fc_norm else "norm", self.width) if self.final_norm else {}

    def flops(self, num_tokens: int) -> TowerFlops:
        """Count the operations for one image; the patch embedding is one product of N patches by 3*P*P values."""
        del num_tokens
        layer = attention_flops(self.num_tokens, self.width, self.mlp_width)
        return TowerFlops(self._front_flops(), layer, 2 * self.width**2 if self.has_head_pooler else 0)

    def _front_flops(self) -> float:
        """Operations of patches and of a conv stem, whose maps shrink by 2 three times: 2*side*side*9*in*out.

        A residual block is two such convolutions from the map's channels to as many.
        """
        if self.stem == "patch":
            return 2 * self.num_patches * 3 * self.patch_size**2 * self.width
        channels, stem = (3, *self.conv_channels), 0
        for level, num_blocks in enumerate(self.stem_blocks):
            side, num_out = self.image_size // 2 ** (level + 1), channels[level + 1]
            stem += 18 * side * side * num_out * (channels[level] + 2 * num_blocks * num_out)
        patch_side = self.patch_size // CONV_STEM_STRIDE_PX
        return stem + 2 * self.num_patches * channels[-1] * patch_side * patch_side * self.width

    def workspace_values(self, num_tokens: int) -> int:
        """Count in a layer residual, norm, q, k, v, and the hidden width twice; or the stem's maps."""
        del num_tokens
        layer = self.num_tokens * (5 * self.width + 2 * self.mlp_width)
        pixels = 3 * self.image_size**2
        first_map = (self.image_size // 2) ** 2 * self.conv_channels[0] if self.stem == "conv" else 0
        return max(layer, pixels + 2 * first_map)

    def fresh_value(self, name: str) -> float | None:
        """Give the first value of LayerScale."""
        return self.init_values if name.endswith(".gamma") else None

    def build(self) -> Any:
        """Build the whole ViT; its head is left to `ProjectionHead`."""
        from shards.compat import deferred_compiler

        with deferred_compiler():
            from timm.layers import LayerNorm, PatchEmbed
            from timm.models.vision_transformer import VisionTransformer
        if self.stem == "conv":
            from shards.towers.conv_stem import build_conv_embed

            embed_layer, patch_size = partial(build_conv_embed, self), self.patch_size // CONV_STEM_STRIDE_PX
        else:
            embed_layer, patch_size = PatchEmbed, self.patch_size
        return VisionTransformer(
            img_size=self.image_size,
            patch_size=patch_size,
            embed_layer=embed_layer,
            num_classes=0,
            global_pool=self.pool,
            embed_dim=self.width,
            reg_tokens=self.num_reg_tokens,
            norm_layer=partial(LayerNorm, eps=self.norm_eps),
            act_layer=None if self.activation == "gelu" else self.activation,  # its default is torch's own exact GELU
            **self.model_dump(include=_TIMM_NAMES),
            weight_init="skip",  # all weights are loaded; and on the meta device, torch's compiler would make them
        )

    def prune(self, module: Any, layers: LayerRange) -> None:
        """Remove all modules that a shard with these layers doesn't own; the others keep their names."""
        from torch import nn

        for layer in range(self.depth):
            if not layers.start <= layer < layers.stop:
                module.blocks[layer] = nn.Identity()
        if not layers.holds_front():
            module.patch_embed = module.cls_token = module.reg_token = module.pos_embed = module.norm_pre = None
        if not layers.holds_head(self.depth):
            module.norm = module.fc_norm = None

    def layer_modules(self, module: Any) -> Any:
        """Give the blocks."""
        return module.blocks

    def pixel_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Choose float32 for a conv stem, which computes in it."""
        import torch

        return torch.float32 if self.stem == "conv" else dtype

    def set_dtype(self, module: Any, dtype: torch.dtype) -> None:
        """Tell a conv stem the dtype of its output."""
        if self.stem == "conv" and module.patch_embed is not None:
            module.patch_embed.backbone.output_dtype = dtype

    def front(self, module: Any, values: torch.Tensor, layout: Any) -> torch.Tensor:
        """Embed patches, class and register tokens, positions; (F, 3, H, W) to (F, L, D)."""
        del layout
        tokens: torch.Tensor = module.norm_pre(module._pos_embed(module.patch_embed(values)))
        return tokens

    def run(self, module: Any, layers: LayerRange, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run blocks in order; (F, L, D) to (F, L, D)."""
        del layout
        for layer in range(layers.start, layers.stop):
            x_FLD = module.blocks[layer](x_FLD)
        return x_FLD

    def pool_tokens(self, module: Any, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run timm's last norm and pooling in float32; (F, L, D) to (F, D)."""
        del layout
        # The norm works token by token: where only the class token is kept, the others need no norm.
        x_FLD = x_FLD[:, :1] if self.pool == "token" else x_FLD
        pooled: torch.Tensor = module.forward_head(module.norm(x_FLD.float()), pre_logits=True)
        return pooled

    def reference(self, module: Any, values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Compute pooled features by timm's own forward functions."""
        del lengths
        pooled: torch.Tensor = module.forward_head(module.forward_features(values), pre_logits=True)
        return pooled

    def use_plain_attention(self, module: Any) -> None:
        """Turn off fused attention."""
        for block in module.blocks:
            block.attn.fused_attn = False


def _conv_shapes(conv: str, batch_norm: str, num_in: int, num_out: int) -> Shapes:
    # Running statistics are buffers: training updates them, evaluation normalises with them.
    statistics: Shapes = {f"{batch_norm}.running_mean": (num_out,), f"{batch_norm}.running_var": (num_out,)}
    return {f"{conv}.weight": (num_out, num_in, 3, 3)} | norm_shapes(batch_norm, num_out) | statistics


TOWERS = (VitTower,)
