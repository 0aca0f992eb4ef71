"""timm's VisionTransformer.

Legend: `F` images (frames), `H, W` sides in px, `L` tokens of one image, `D` width.
Source: timm 1.0.31, `VisionTransformer.forward_features` and `forward_head`, whose steps these methods follow.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from shards.compat import with_positions
from shards.file_schema import require_multiple
from shards.ranges import LayerRange
from shards.towers.base import Shapes, linear_shapes, norm_shapes
from shards.towers.timm_tower import TimmVisionTower

if TYPE_CHECKING:
    import torch


# Factor by which three convolutions of stride 2 shrink an image.
CONV_STEM_STRIDE_PX = 8

VisionActivation = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "silu"]

# Settings under timm's own names.
_TIMM_NAMES = {"depth", "num_heads", "mlp_ratio", "qkv_bias", "init_values", "class_token", "pos_embed"}
_TIMM_NAMES |= {"no_embed_class", "pre_norm", "final_norm", "fc_norm"}
_TIMM_NAMES |= {"qk_norm", "scale_attn_norm", "scale_mlp_norm", "proj_bias"}


class VitTower(TimmVisionTower):
    """A ViT as timm builds it."""

    label = "ViT"
    # Rounding to bfloat16 turned an image's vector by 4 degrees in the stem, but only by a quarter degree in six
    # layers.
    float32_prefixes = ("patch_embed.backbone.",)

    family: Literal["vit"] = "vit"
    stem: Literal["patch", "conv"] = Field(
        "patch", description="conv: three 3x3 convolutions of stride 2 (BatchNorm, GELU) before the patches are cut"
    )
    stem_channels: tuple[int, int, int] | None = Field(
        None, description="output channels of the conv stem's convolutions; none: width / 4, width / 2, width"
    )
    stem_blocks: tuple[int, int, int] = Field((0, 0, 0), description="timm residual blocks after each of them")
    norm: Literal["layer", "rms"] = Field("layer", description="kind of all norms")
    embed_norm: bool = Field(False, description="norm of the patches before their positions are added")
    proj_bias: bool = Field(True, description="bias of the MLP and of the attention's output projection")
    pooler: Literal["none", "tanh"] = Field("none", description="dense + tanh on the class token, as in HF's ViTModel")
    activation: VisionActivation = "gelu"

    @model_validator(mode="after")
    def _buildable(self) -> Self:
        if self.stem == "conv":
            require_multiple("image_size", self.image_size, "patch_size", self.patch_size)
            require_multiple("patch_size", self.patch_size, "the conv stem's stride", CONV_STEM_STRIDE_PX)
            if self.stem_channels is None:
                require_multiple("width", self.width, "the conv stem's first narrowing", 4)
            if self.embed_norm:
                raise ValueError('embed_norm belongs to stem = "patch"; write that, or leave it out')
        elif self.stem_channels is not None or any(self.stem_blocks):
            raise ValueError('stem_channels and stem_blocks belong to stem = "conv"; write that, or leave them out')
        if min((*self.stem_blocks, *(number - 1 for number in self.stem_channels or ()))) < 0:
            raise ValueError(f"stem_channels {self.stem_channels} from 1 up, stem_blocks {self.stem_blocks} from 0 up")
        if self.pooler != "none" and self.pool != "token":
            raise ValueError(f'a pooler works on the class token, and pool is "{self.pool}"; write pool "token"')
        if self.mlp == "swiglu_packed":
            require_multiple("the MLP's hidden width", self.mlp_width, "its two halves", 2)
        return self

    @property
    def conv_channels(self) -> tuple[int, int, int]:
        """Output channels of the conv stem's three convolutions."""
        return self.stem_channels or (self.width // 4, self.width // 2, self.width)

    @property
    def mlp_units(self) -> int:
        """Width of the input to the MLP's output projection: half of the units if gate and value are packed."""
        return self.mlp_width // 2 if self.mlp == "swiglu_packed" else self.mlp_width

    @property
    def has_head_pooler(self) -> bool:
        """Whether a dense layer and tanh follow pooling, as in HF's ViTModel."""
        return self.pooler == "tanh"

    def norm_shapes(self, name: str, width: int) -> Shapes:
        """Return the shapes of a norm; an RMSNorm has no bias."""
        return norm_shapes(name, width) if self.norm == "layer" else {f"{name}.weight": (width,)}

    def patch_shapes(self) -> Shapes:
        """Return the shapes of the patch embedding, without its bias."""
        if self.stem == "patch":
            norm = self.norm_shapes("patch_embed.norm", self.width) if self.embed_norm else {}
            return super().patch_shapes() | norm
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
        """Return the shapes of a block."""
        width = self.width
        scales: Shapes = {"ls1.gamma": (width,), "ls2.gamma": (width,)} if self.init_values else {}
        return (
            self.norm_shapes("norm1", width)
            | linear_shapes("attn.qkv", width, 3 * width, bias=self.qkv_bias)
            | self.attention_norm_shapes()
            | linear_shapes("attn.proj", width, width, bias=self.proj_bias)
            | self.norm_shapes("norm2", width)
            | self.mlp_shapes(bias=self.proj_bias)
            | scales
        )

    def front_flops(self) -> float:
        """Count the operations of patches and of a conv stem, whose maps shrink by 2 three times: 2*side*side*9*in*out.

        A residual block is two such convolutions that keep the number of channels.
        """
        if self.stem == "patch":
            return super().front_flops()
        channels, stem = (3, *self.conv_channels), 0
        for level, num_blocks in enumerate(self.stem_blocks):
            side, num_out = self.image_size // 2 ** (level + 1), channels[level + 1]
            stem += 18 * side * side * num_out * (channels[level] + 2 * num_blocks * num_out)
        patch_side = self.patch_size // CONV_STEM_STRIDE_PX
        return stem + 2 * self.num_patches * channels[-1] * patch_side * patch_side * self.width

    def workspace_values(self, num_tokens: int) -> int:
        """Count residual, norm, q, k, v, and the MLP's hidden width of a layer; or the stem's maps."""
        first_map = (self.image_size // 2) ** 2 * self.conv_channels[0] if self.stem == "conv" else 0
        return max(super().workspace_values(num_tokens), 3 * self.image_size**2 + 2 * first_map)

    def build(self) -> Any:
        """Build the whole ViT without its head, which `ProjectionHead` provides."""
        from shards.compat import deferred_compiler

        with deferred_compiler():
            from timm.layers import LayerNorm, Mlp, PatchEmbed, RmsNorm, SwiGLU, SwiGLUPacked
            from timm.models.vision_transformer import VisionTransformer
        if self.stem == "conv":
            from shards.towers.conv_stem import build_conv_embed

            sizes = (self.image_size, CONV_STEM_STRIDE_PX)
            embed_layer = partial(build_conv_embed, self.conv_channels, self.stem_blocks, *sizes)
            patch_size = self.patch_size // CONV_STEM_STRIDE_PX
        else:
            embed_layer, patch_size = PatchEmbed, self.patch_size
        norm_layer = partial(LayerNorm if self.norm == "layer" else RmsNorm, eps=self.norm_eps)
        return VisionTransformer(
            img_size=self.image_size,
            patch_size=patch_size,
            embed_layer=embed_layer,
            num_classes=0,
            global_pool=self.pool,
            embed_dim=self.width,
            reg_tokens=self.num_reg_tokens,
            norm_layer=norm_layer,
            embed_norm_layer=norm_layer if self.embed_norm else None,
            mlp_layer={"mlp": Mlp, "swiglu": SwiGLU, "swiglu_packed": SwiGLUPacked}[self.mlp],
            act_layer=None if self.activation == "gelu" else self.activation,  # the default is torch's own exact GELU
            **self.model_dump(include=_TIMM_NAMES),
            weight_init="skip",  # all weights are loaded; and on the meta device, torch's compiler would make them
        )

    def pixel_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Choose float32 for a conv stem, which computes in it."""
        import torch

        return torch.float32 if self.stem == "conv" else dtype

    def set_dtype(self, module: Any, dtype: torch.dtype) -> None:
        """Set the output dtype of a conv stem."""
        if self.stem == "conv" and module.patch_embed is not None:
            module.patch_embed.backbone.output_dtype = dtype

    def front(self, module: Any, values: torch.Tensor, layout: Any) -> torch.Tensor:
        """Embed patches, class and register tokens, and positions; (F, 3, H, W) to (F, L, D)."""
        del layout
        tokens: torch.Tensor = module.norm_pre(with_positions(module, module.patch_embed(values)))
        return tokens

    def run(self, module: Any, layers: LayerRange, x_FLD: torch.Tensor, layout: Any) -> torch.Tensor:
        """Run blocks in order; (F, L, D) to (F, L, D)."""
        del layout
        for layer in range(layers.start, layers.stop):
            x_FLD = module.blocks[layer](x_FLD)
        return x_FLD


def _conv_shapes(conv: str, batch_norm: str, num_in: int, num_out: int) -> Shapes:
    # Running statistics are buffers: training updates them, evaluation normalises by them.
    statistics: Shapes = {f"{batch_norm}.running_mean": (num_out,), f"{batch_norm}.running_var": (num_out,)}
    return {f"{conv}.weight": (num_out, num_in, 3, 3)} | norm_shapes(batch_norm, num_out) | statistics


TOWERS = (VitTower,)
