"""Convolutional stem of a ViT: a small backbone in front of its patches."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from timm.layers import GELU, ConvNormAct, HybridEmbed
from timm.models.resnet import BasicBlock
from torch import nn


def build_conv_embed(
    conv_channels: Sequence[int], stem_blocks: Sequence[int], image_size: int, stride_px: int, **settings: Any
) -> Any:
    """Build timm's hybrid embedding: a small convolutional backbone, then patches of its feature map.

    `conv_channels` and `stem_blocks` (residual blocks) are per step, each of which halves the sides of its map;
    `stride_px` is that of all steps together; `settings` are further ones of `HybridEmbed`.

    Source: Xiao et al. 2021, "Early Convolutions Help Transformers See Better"; He et al. 2015 (ResNet); timm 1.0.31
    `HybridEmbed`, `BasicBlock`.
    """
    channels, layers = (3, *conv_channels), []
    for (num_in, num_out), num_blocks in zip(pairwise(channels), stem_blocks, strict=True):
        layers.append(ConvNormAct(num_in, num_out, 3, stride=2, act_layer=nn.GELU))
        layers.extend(BasicBlock(num_out, num_out, act_layer=GELU) for _ in range(num_blocks))
    backbone = ConvStem(*layers)
    setattr(backbone, "num_features", channels[-1])  # noqa: B010 - where HybridEmbed looks; mypy takes it for a module
    feature_size = image_size // stride_px
    return HybridEmbed(backbone, feature_size=feature_size, feature_ratio=stride_px, **settings)


class ConvStem(nn.Sequential):
    """Convolutions in float32 whatever the compute dtype; only their output is cast to it."""

    output_dtype = torch.float32

    def forward(self, pixels_F3HW: torch.Tensor) -> torch.Tensor:
        """Compute the feature map that patches are cut from; (F, 3, H, W) to (F, channels, H / 8, W / 8)."""
        x = pixels_F3HW.float()
        for block in self:
            x = block(x)
        return x.to(self.output_dtype)
