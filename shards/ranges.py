"""Ranges of layers that a shard holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from pydantic import ConfigDict

from shards.errors import ModelError

if TYPE_CHECKING:
    from shards.config import ModelConfig

# Plan files are parsed strictly into these classes.
STRICT = ConfigDict(extra="forbid", strict=True, defer_build=True)


@dataclass(frozen=True)
class LayerRange:
    """Layers `start` up to, not including, `stop` of one tower; empty where the two are equal."""

    __pydantic_config__ = STRICT

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ModelError(
                f"layers [{self.start}, {self.stop}): a range starts at 0 or later and ends at its start or later"
            )

    def __len__(self) -> int:
        return self.stop - self.start

    def holds_front(self) -> bool:
        """Whether the range holds the embeddings: it has layers, the first among them."""
        return len(self) > 0 and self.start == 0

    def holds_head(self, depth: int) -> bool:
        """Whether the range holds norm, pooling and projection: it has layers, the last among them."""
        return len(self) > 0 and self.stop == depth


NOTHING = LayerRange(0, 0)


@dataclass(frozen=True)
class ShardSpec:
    """The layers of both towers that one shard holds; either range may be empty."""

    __pydantic_config__ = STRICT

    vision: LayerRange
    text: LayerRange

    def layers_of(self, side: str) -> LayerRange:
        """Give the layers of one side."""
        return self.vision if side == "vision" else self.text


def only(side: str, layers: LayerRange) -> ShardSpec:
    """Make the spec of layers of one tower."""
    return ShardSpec(layers, NOTHING) if side == "vision" else ShardSpec(NOTHING, layers)


def whole_model(config: ModelConfig) -> ShardSpec:
    """Make the spec of a single shard that holds everything."""
    return ShardSpec(*(LayerRange(0, config.num_layers[side]) for side in ("vision", "text")))


def vision_only(config: ModelConfig) -> ShardSpec:
    """Make the spec that encodes images; the text tower's weights are not read.

    Raises:
        ModelError: the model has no vision tower.
    """
    return ShardSpec(LayerRange(0, config.required_vision.num_layers), NOTHING)


def text_only(config: ModelConfig) -> ShardSpec:
    """Make the spec that encodes captions and queries; the vision tower's weights are not read.

    Raises:
        ModelError: the model has no text tower.
    """
    return ShardSpec(NOTHING, LayerRange(0, config.required_text.num_layers))


def specs_between(cuts: Sequence[tuple[int, int]]) -> list[ShardSpec]:
    """Make the specs of the layers between each cut (vision layers, text layers in front of it) and the next."""
    return [ShardSpec(LayerRange(start[0], stop[0]), LayerRange(start[1], stop[1])) for start, stop in pairwise(cuts)]


def check_spec(spec: ShardSpec, config: ModelConfig) -> None:
    """Check that the ranges end within the towers.

    Raises:
        ModelError: one of them doesn't.
    """
    for side, depth in config.num_layers.items():
        layers = spec.layers_of(side)
        if layers.stop > depth:
            raise ModelError(
                f"{side} layers [{layers.start}, {layers.stop}): model {config.name!r} has {depth} of them; "
                "make the plan again for this model"
            )
