"""Costs of a shard: floating-point operations, weight bytes, and the bytes that leave it."""

from dataclasses import dataclass
from math import prod
from typing import Literal

from shards.config import ModelConfig
from shards.ranges import LayerRange
from shards.shard_specs import ShardSpec
from shards.tensor_shapes import held_dtype, projection_shapes, shard_shapes
from shards.towers.base import Shape, Shapes

Dtype = Literal["float32", "bfloat16", "float16", "int8"]

# Bytes of an activation's value by compute dtype; `held_dtype` gives the dtype of a weight.
BYTES_PER_VALUE: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 4}


@dataclass(frozen=True)
class TowerCosts:
    """Operations of one tower, with its projection, for one input.

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


def tower_costs(config: ModelConfig, side: str, num_tokens: int) -> TowerCosts:
    """Count the operations for one input: an image (one frame), or a caption of `num_tokens`; none without a tower.

    Args:
        config: the model.
        side: `vision` or `text`.
        num_tokens: length of a caption, in tokens; of no account for images.
    """
    tower = config.towers.get(side)
    if tower is None:
        return TowerCosts(0.0, 0.0, 0.0, 0)
    flops = tower.flops(num_tokens)
    projection = 2 * sum(prod(shape) for shape in projection_shapes(config, side).values() if len(shape) == 2)
    return TowerCosts(flops.front, flops.layer, flops.head + projection, tower.num_layers)


def weight_bytes(config: ModelConfig, spec: ShardSpec, dtype: Dtype) -> int:
    """Compute the bytes of a loaded shard's weights."""
    return sum(
        tensor_bytes(shape, held_dtype(config, name, shape, dtype))
        for name, shape in shard_shapes(config, spec).items()
    )


def tensor_bytes(shape: Shape, held: str) -> int:
    """Compute the bytes of one tensor; in int8 one byte per value, and a float32 scale per output channel."""
    if held == "int8":
        return prod(shape) + shape[0] * BYTES_PER_VALUE["float32"]
    return prod(shape) * BYTES_PER_VALUE[held]


def count_parameters(shapes: Shapes) -> int:
    """Count the values of all tensors together."""
    return sum(prod(shape) for shape in shapes.values())


def cut_bytes(config: ModelConfig, side: str, layer: int, dtype: Dtype, num_tokens: int) -> int:
    """Compute the bytes of one input's state at a cut: the input itself, an activation, or the embedding; or nothing.

    The frames of a video share one embedding; here it counts once for each of them.
    """
    tower = config.towers.get(side)
    if tower is None:
        return 0
    if layer == 0:
        return tower.input_bytes(num_tokens)
    if layer == tower.num_layers:
        return config.embedding_dim * BYTES_PER_VALUE["float32"]
    return tower.tokens_in(num_tokens) * tower.dim * BYTES_PER_VALUE[dtype]
