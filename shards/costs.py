"""Costs of a shard: floating-point operations, weight bytes, and the bytes that leave it.

A multiply and an add count as two operations. Norms, activations, biases and softmax are left out: they are a few
percent, and about the same share of every layer.
"""

from dataclasses import dataclass
from math import prod
from typing import Literal

from shards.config import CONV_STEM_STRIDE_PX, ModelConfig, TextConfig, VisionConfig
from shards.ranges import LayerRange, ShardSpec
from shards.tensor_shapes import Shape, Shapes, held_dtype, shard_shapes

Dtype = Literal["float32", "bfloat16", "float16", "int8"]

# Bytes of an activation's value by compute dtype; `held_dtype` gives the dtype of a weight.
BYTES_PER_VALUE: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 4}


@dataclass(frozen=True)
class TowerCosts:
    """Operations of one tower for one input.

    Attributes:
        front: operations of the embeddings (and stem), which belong to the first layer.
        layer: operations of one layer.
        head: operations of pooling and projection, which belong to the last layer.
        depth: number of layers.
    """

    front: float
    layer: float
    head: float
    depth: int

    def of(self, layers: LayerRange) -> float:
        """Operations of a range of layers, with the front and the head where it holds them."""
        front = self.front if layers.holds_front() else 0.0
        head = self.head if layers.holds_head(self.depth) else 0.0
        return front + self.layer * len(layers) + head


def vision_costs(config: ModelConfig) -> TowerCosts:
    """Count the operations for one image (one frame).

    For L tokens of width D and an MLP of M: q, k, v take 2*L*D*3D, scores and their sum 2*L*L*D each, the output
    projection 2*L*D*D, the MLP 2*L*D*M twice. The patch embedding is one matrix product of N patches by 3*P*P values.
    """
    vision = config.vision
    num_tokens, width = vision.num_tokens, vision.width
    attention = 8 * num_tokens * width**2 + 4 * num_tokens**2 * width
    pooler = 2 * width**2 if vision.pooler == "tanh" else 0
    return TowerCosts(
        front=_front_flops(vision),
        layer=attention + 4 * num_tokens * width * vision.mlp_width,
        head=pooler + 2 * width * config.embedding_dim,
        depth=vision.depth,
    )


def _front_flops(vision: VisionConfig) -> float:
    """Operations of the patch embedding and of a conv stem, whose maps shrink by 2 three times: 2*side*side*9*in*out.

    A residual block is two such convolutions from the map's channels to as many.
    """
    if vision.stem == "patch":
        return 2 * vision.num_patches * 3 * vision.patch_size**2 * vision.width
    channels, stem = (3, *vision.conv_channels), 0
    for level, num_blocks in enumerate(vision.stem_blocks):
        side, num_out = vision.image_size // 2 ** (level + 1), channels[level + 1]
        stem += 18 * side * side * num_out * (channels[level] + 2 * num_blocks * num_out)
    patch_side = vision.patch_size // CONV_STEM_STRIDE_PX
    return stem + 2 * vision.num_patches * channels[-1] * patch_side * patch_side * vision.width


def text_costs(config: ModelConfig, num_tokens: int) -> TowerCosts:
    """Count the operations for one caption of `num_tokens`; the arithmetic of a layer is that of `vision_costs`."""
    text = config.text
    width = text.hidden_size
    attention = 8 * num_tokens * width**2 + 4 * num_tokens**2 * width
    pooler = 2 * width**2 if text.pool == "pooler" else 0
    return TowerCosts(
        front=2 * num_tokens * text.embedding_size * width,
        layer=text.inner_group_num * (attention + 4 * num_tokens * width * text.intermediate_size),
        head=pooler + 2 * width * config.embedding_dim,
        depth=text.num_hidden_layers,
    )


def weight_bytes(config: ModelConfig, spec: ShardSpec, dtype: Dtype) -> int:
    """Compute the bytes of a loaded shard's weights.

    Args:
        config: the model.
        spec: the layers of the shard.
        dtype: compute dtype.
    """
    return sum(
        tensor_bytes(shape, held_dtype(name, shape, dtype)) for name, shape in shard_shapes(config, spec).items()
    )


def tensor_bytes(shape: Shape, held: str) -> int:
    """Compute the bytes of one tensor; in int8 one byte per value, and a float32 scale per output channel."""
    if held == "int8":
        return prod(shape) + shape[0] * BYTES_PER_VALUE["float32"]
    return prod(shape) * BYTES_PER_VALUE[held]


def count_parameters(shapes: Shapes) -> int:
    """Count the values of all tensors together."""
    return sum(prod(shape) for shape in shapes.values())


def cut_bytes_per_image(config: ModelConfig, layer: int, dtype: Dtype) -> int:
    """Compute the bytes of one image's state at a cut: pixels, an activation, or the embedding.

    The frames of a video share one embedding; here it counts once for each of them.

    Args:
        config: the model.
        layer: number of vision layers before the cut.
        dtype: compute dtype.
    """
    vision: VisionConfig = config.vision
    if layer == 0:
        return 3 * vision.image_size**2
    if layer == vision.depth:
        return config.embedding_dim * BYTES_PER_VALUE["float32"]
    return vision.num_tokens * vision.width * BYTES_PER_VALUE[dtype]


def cut_bytes_per_caption(config: ModelConfig, layer: int, dtype: Dtype, num_tokens: int) -> int:
    """Compute the bytes of one caption's state at a cut: int32 token ids, an activation, or the embedding.

    Args:
        config: the model.
        layer: number of text layers before the cut.
        dtype: compute dtype.
        num_tokens: tokens of the caption.
    """
    text: TextConfig = config.text
    if layer == 0:
        return num_tokens * 4
    if layer == text.num_hidden_layers:
        return config.embedding_dim * BYTES_PER_VALUE["float32"]
    return num_tokens * text.hidden_size * BYTES_PER_VALUE[dtype]
