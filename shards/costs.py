"""Costs of a shard: floating-point operations, weight bytes, and the bytes that leave it."""

from dataclasses import dataclass
from math import prod
from typing import Literal

from shards.model_config import ModelConfig
from shards.ranges import LayerRange
from shards.shard_specs import ShardSpec
from shards.tensor_shapes import held_dtype, projection_shapes, shard_shapes
from shards.towers.base import Shape, Shapes

Dtype = Literal["float32", "bfloat16", "float16", "int8"]

# Bytes of an activation's value by compute dtype; for weights, see `held_dtype`.
BYTES_PER_VALUE: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 4}


@dataclass(frozen=True)
class TowerCosts:
    """Operations of one tower, with its projection, for one input.

    `front` (embeddings, stem) belongs to the first layer, `head` (pooling, projection) to the last; `layer` is the
    mean, `shares` are as in `Tower.layer_shares`.
    """

    front: float
    layer: float
    head: float
    depth: int
    shares: tuple[float, ...] = ()

    def of(self, layers: LayerRange) -> float:
        """Return the operations of a range of layers, including front and head where the range holds them."""
        front = self.front if layers.holds_front() else 0.0
        head = self.head if layers.holds_head(self.depth) else 0.0
        return front + self.layer * layers.count(self.shares) + head


def tower_costs(config: ModelConfig, side: str, num_tokens: int) -> TowerCosts:
    """Count the operations for one input: an image (one frame), or a caption of `num_tokens`; none without a tower."""
    tower = config.towers.get(side)
    if tower is None:
        return TowerCosts(0.0, 0.0, 0.0, 0)
    flops = tower.flops(num_tokens)
    projection = 2 * sum(prod(shape) for shape in projection_shapes(config, side).values() if len(shape) == 2)
    return TowerCosts(flops.front, flops.layer, flops.head + projection, tower.num_layers, tower.layer_shares)


def weight_bytes(config: ModelConfig, spec: ShardSpec, dtype: Dtype) -> int:
    """Return the bytes of a loaded shard's weights."""
    return sum(
        tensor_bytes(shape, held_dtype(config, name, shape, dtype))
        for name, shape in shard_shapes(config, spec).items()
    )


def tensor_bytes(shape: Shape, held: str) -> int:
    """Return the bytes of one tensor; in int8 one per value, plus a float32 scale per output channel."""
    if held == "int8":
        return prod(shape) + shape[0] * BYTES_PER_VALUE["float32"]
    return prod(shape) * BYTES_PER_VALUE[held]


def count_parameters(shapes: Shapes) -> int:
    """Count the values of all tensors together."""
    return sum(prod(shape) for shape in shapes.values())


def cut_bytes(config: ModelConfig, side: str, layer: int, dtype: Dtype, num_tokens: int) -> int:
    """Return the bytes of one input's state at a cut: the input itself, an activation, the embedding, or nothing.

    The frames of a video share one embedding, but here it counts once per frame.
    """
    tower = config.towers.get(side)
    if tower is None:
        return 0
    if layer == 0:
        return tower.input_bytes(num_tokens)
    if layer == tower.num_layers:
        return config.vector_dim * BYTES_PER_VALUE["float32"]
    return tower.values_at(layer, num_tokens) * BYTES_PER_VALUE[dtype]
