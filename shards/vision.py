"""Vision tower: timm's VisionTransformer, whole or pruned to a range of its layers.

Legend: `F` images (frames), `H, W` sides in px, `L` tokens of one image, `D` width, `E` embedding size.
Source: timm 1.0.31, `VisionTransformer.forward_features` and `forward_head`, whose steps these functions follow.
"""

from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from shards.compat import deferred_compiler
from shards.config import CONV_STEM_STRIDE_PX, PreprocessConfig, VisionConfig
from shards.errors import ModelError
from shards.ranges import LayerRange

# Settings that have timm's names.
_TIMM_NAMES = {"depth", "num_heads", "mlp_ratio", "qkv_bias", "init_values", "class_token", "pos_embed"}
_TIMM_NAMES |= {"no_embed_class", "pre_norm", "final_norm", "fc_norm"}


def build_vit(config: VisionConfig) -> Any:
    """Build the whole ViT on torch's current default device; its head is left to `ProjectionHead`."""
    with deferred_compiler():
        from timm.layers import LayerNorm, PatchEmbed
        from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=config.image_size,
        patch_size=config.patch_size if config.stem == "patch" else config.patch_size // CONV_STEM_STRIDE_PX,
        embed_layer=PatchEmbed if config.stem == "patch" else partial(_build_conv_embed, config),
        num_classes=0,
        global_pool=config.pool,
        embed_dim=config.width,
        reg_tokens=config.num_reg_tokens,
        norm_layer=partial(LayerNorm, eps=config.norm_eps),
        act_layer=None if config.activation == "gelu" else config.activation,  # its default is torch's own exact GELU
        **config.model_dump(include=_TIMM_NAMES),
        weight_init="skip",  # all weights are loaded; and on the meta device, torch's compiler would make them
    )


def _build_conv_embed(config: VisionConfig, **settings: Any) -> Any:
    """Build timm's hybrid embedding: a small convolutional backbone, then patches of its feature map.

    Source: Xiao et al. 2021, "Early Convolutions Help Transformers See Better"; He et al. 2015 (ResNet); timm 1.0.31
    `HybridEmbed`, `BasicBlock`.
    """
    from timm.layers import GELU, ConvNormAct, HybridEmbed
    from timm.models.resnet import BasicBlock

    channels, layers = (3, *config.conv_channels), []
    for (num_in, num_out), num_blocks in zip(pairwise(channels), config.stem_blocks, strict=True):
        layers.append(ConvNormAct(num_in, num_out, 3, stride=2, act_layer=nn.GELU))
        layers.extend(BasicBlock(num_out, num_out, act_layer=GELU) for _ in range(num_blocks))
    backbone = ConvStem(*layers)
    setattr(backbone, "num_features", channels[-1])  # noqa: B010 - where HybridEmbed looks; mypy takes it for a module
    feature_size = config.image_size // CONV_STEM_STRIDE_PX
    return HybridEmbed(backbone, feature_size=feature_size, feature_ratio=CONV_STEM_STRIDE_PX, **settings)


class ConvStem(nn.Sequential):
    """Convolutions in float32 whatever the compute dtype; only their output is cast to it."""

    output_dtype = torch.float32

    def forward(self, pixels_F3HW: torch.Tensor) -> torch.Tensor:
        """Compute the feature map that patches are cut from; (F, 3, H, W) to (F, channels, H / 8, W / 8)."""
        x = pixels_F3HW.float()
        for block in self:
            x = block(x)
        return x.to(self.output_dtype)


def prune_vit(vit: Any, layers: LayerRange) -> None:
    """Remove all modules that a shard with these layers doesn't own; the others keep their names."""
    depth = len(vit.blocks)
    vit.blocks = nn.ModuleDict({str(layer): vit.blocks[layer] for layer in range(layers.start, layers.stop)})
    if not layers.holds_front():
        vit.patch_embed = vit.cls_token = vit.reg_token = vit.pos_embed = vit.norm_pre = None
    if not layers.holds_head(depth):
        vit.norm = vit.fc_norm = None


def check_pixels(pixels_FHWC: torch.Tensor, image_size: int) -> None:
    """Check the pixels, uint8 (F, H, W, 3).

    Raises:
        ModelError: this is no uint8 tensor of square RGB images of the model's size.
    """
    if pixels_FHWC.dtype != torch.uint8 or tuple(pixels_FHWC.shape[1:]) != (image_size, image_size, 3):
        raise ModelError(
            f"pixels: found {pixels_FHWC.dtype} {list(pixels_FHWC.shape)}, the model takes torch.uint8 "
            f"[F, {image_size}, {image_size}, 3]; decode to the model folder's preprocess.image_size"
        )


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
        """Scale to [0, 1], subtract the mean, divide by the deviation; (F, 3, H, W)."""
        pixels = pixels_FHWC.to(self.mean.device).permute(0, 3, 1, 2).contiguous().float()
        return pixels.div_(255).sub_(self.mean).div_(self.std).to(dtype)


def embed_pixels(vit: Any, pixels_F3HW: torch.Tensor) -> torch.Tensor:
    """Embed patches, class and register tokens, positions; (F, 3, H, W) to (F, L, D)."""
    tokens: torch.Tensor = vit.norm_pre(vit._pos_embed(vit.patch_embed(pixels_F3HW)))
    return tokens


def run_vit_blocks(vit: Any, x_FLD: torch.Tensor) -> torch.Tensor:
    """Run the blocks of a pruned ViT in order; (F, L, D) to (F, L, D)."""
    for block in vit.blocks.values():
        x_FLD = block(x_FLD)
    return x_FLD


def pool_vit_tokens(vit: Any, x_FLD: torch.Tensor) -> torch.Tensor:
    """Run timm's last norm and pooling in float32; (F, L, D) to (F, D)."""
    # The norm works token by token: where only the class token is kept, the others need no norm.
    x_FLD = x_FLD[:, :1] if vit.global_pool == "token" else x_FLD
    pooled: torch.Tensor = vit.forward_head(vit.norm(x_FLD.float()), pre_logits=True)
    return pooled
