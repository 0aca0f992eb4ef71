"""Layers of both towers that a shard holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from shards.model_errors import ModelError
from shards.ranges import STRICT, LayerRange

if TYPE_CHECKING:
    from shards.model_config import ModelConfig

NOTHING = LayerRange(0, 0)


@dataclass(frozen=True)
class ShardSpec:
    """The layers of both towers that one shard holds; either range may be empty."""

    __pydantic_config__ = STRICT

    vision: LayerRange
    text: LayerRange

    def layers_of(self, side: str) -> LayerRange:
        """Return the layers of one side."""
        return self.vision if side == "vision" else self.text


def one_tower(side: str, layers: LayerRange) -> ShardSpec:
    """Make the spec of layers of one tower."""
    return ShardSpec(layers, NOTHING) if side == "vision" else ShardSpec(NOTHING, layers)


def whole_model(config: ModelConfig) -> ShardSpec:
    """Make the spec of a single shard that holds everything."""
    return ShardSpec(*(LayerRange(0, config.num_layers[side]) for side in ("vision", "text")))


def vision_only(config: ModelConfig) -> ShardSpec:
    """Make the spec that only encodes images; raises a ModelError without a vision tower."""
    return ShardSpec(LayerRange(0, config.required_vision.num_layers), NOTHING)


def text_only(config: ModelConfig) -> ShardSpec:
    """Make the spec that only encodes captions and queries; raises a ModelError without a text tower."""
    return ShardSpec(NOTHING, LayerRange(0, config.required_text.num_layers))


def specs_between(cuts: Sequence[tuple[int, int]]) -> list[ShardSpec]:
    """Make the specs of the layers between consecutive cuts (vision layers, text layers before the cut)."""
    return [ShardSpec(LayerRange(start[0], stop[0]), LayerRange(start[1], stop[1])) for start, stop in pairwise(cuts)]


def check_spec(spec: ShardSpec, config: ModelConfig) -> None:
    """Raise a ModelError unless the ranges end within the towers."""
    for side, depth in config.num_layers.items():
        layers = spec.layers_of(side)
        if layers.stop > depth:
            raise ModelError(
                f"{side} layers [{layers.start}, {layers.stop}): model {config.name!r} has {depth} of them; "
                "make the plan again for this model"
            )
