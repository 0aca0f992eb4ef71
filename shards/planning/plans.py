"""Plan: the cut of one model into stages, their devices, and the prediction; a file that people read. Pure."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from pydantic import TypeAdapter, ValidationError

from shards.config import ModelConfig, describe
from shards.errors import ModelError
from shards.planning.workload import DataMix
from shards.ranges import STRICT, LayerRange, ShardSpec, check_spec


@dataclass(frozen=True)
class PlannedStage:
    """One stage: its layers, their costs, and its devices.

    Attributes:
        spec: the layers of both towers.
        weight_bytes: bytes of the loaded weights.
        flops_per_image: operations for one image (one frame of a video).
        flops_per_caption: operations for one caption of the planned length.
        cut_bytes_per_image: bytes of one image's state that leave the stage.
        cut_bytes_per_caption: bytes of one caption's state that leave the stage.
        device: type of the devices; None without a fleet.
        num_replicas: replicas that reach the predicted throughput.
        num_gpus: GPUs of each replica, or the part of one; 0 on CPUs; None without a fleet.
        num_threads: torch threads of each replica on CPUs.
        seconds_per_item: seconds of one replica per item, its share of the transfers included.
        memory_bytes: memory of one replica: weights, activations of a batch, workspace.
    """

    __pydantic_config__ = STRICT

    spec: ShardSpec
    weight_bytes: int
    flops_per_image: float
    flops_per_caption: float
    cut_bytes_per_image: int
    cut_bytes_per_caption: int
    device: str | None = None
    num_replicas: int = 1
    num_gpus: float | None = None
    num_threads: int | None = None
    seconds_per_item: float | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True)
class ShardPlan:
    """A cut of one model into stages, in order, with the prediction.

    Attributes:
        model_fingerprint: fingerprint of the weights that it was made for, if known.
        stages: the stages.
        mix: means over the items that were planned for.
        dtype: compute dtype.
        costs: "measured" or "estimated" seconds; None where only operations were balanced.
        items_per_s: predicted throughput.
        bottleneck: its limit: "stage 1", "decode" or "shared cores".
        reasons: throughputs of one stage less and one more.
    """

    __pydantic_config__ = STRICT

    model_fingerprint: str | None
    stages: tuple[PlannedStage, ...]
    mix: DataMix | None = None
    dtype: str | None = None
    costs: str | None = None
    items_per_s: float | None = None
    bottleneck: str | None = None
    reasons: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Write the text of a plan file."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @staticmethod
    def from_json(text: str) -> "ShardPlan":
        """Read a plan file's text.

        Raises:
            ModelError: it is no plan.
        """
        try:
            return TypeAdapter(ShardPlan).validate_json(text)
        except ValidationError as error:
            raise ModelError(f"plan: {describe(error)}; make it again with `embedder plan --out`") from None


def check_plan(plan: ShardPlan, config: ModelConfig) -> None:
    """Check that the stages hold each layer of both towers once, in order, and at least one each.

    Raises:
        ModelError: they don't.
    """
    specs = [stage.spec for stage in plan.stages]
    for spec in specs:
        check_spec(spec, config)
    for number, spec in enumerate(specs):
        if not len(spec.vision) and not len(spec.text):
            raise ModelError(f"plan: stage {number} holds no layer; leave it out")
    _check_tower("vision", [spec.vision for spec in specs], config.vision.depth)
    _check_tower("text", [spec.text for spec in specs], config.text.num_hidden_layers)


def _check_tower(tower: str, ranges: Sequence[LayerRange], depth: int) -> None:
    expected = 0
    for number, layers in enumerate(ranges):
        if layers.start != expected:
            raise ModelError(
                f"plan: {tower} layers of stage {number} start at {layers.start}, expected {expected}; "
                "each layer belongs to one stage, in order"
            )
        expected = layers.stop
    if expected != depth:
        raise ModelError(f"plan: {tower} layers end at {expected}, the model has {depth}; the last stage ends there")
