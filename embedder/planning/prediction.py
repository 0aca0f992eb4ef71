"""How fast a given cut runs: the slowest of its steps, or the cores that all of them share. Pure.

A step with its replicas does so many items a second; a machine's cores do as many as their seconds hold, whatever needs
them: decoding, stages on the CPU, writing, Ray itself. The least of these is what a run reaches once it is under way.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shards.config import ModelConfig
from shards.costs import Dtype, cut_bytes_per_caption, cut_bytes_per_image
from shards.planning.costs import HostCosts, ModelCosts
from shards.planning.mix import DataMix
from shards.ranges import ShardSpec


@dataclass(frozen=True)
class StageShape:
    """One stage as it runs.

    Attributes:
        spec: its layers.
        num_replicas: processes.
        num_threads: cores that one keeps busy; 0 on a GPU.
        share: the part of its time that one may compute, below 1 under a CPU quota.
    """

    spec: ShardSpec
    num_replicas: int = 1
    num_threads: int = 1
    share: float = 1.0


@dataclass(frozen=True)
class Host:
    """The machine around the stages.

    Attributes:
        num_cores: shared by all; none where nobody knows (a cluster).
        num_decoders: decode tasks that may run at once.
        rows_per_batch: items that pass together.
    """

    num_cores: float | None
    num_decoders: int
    rows_per_batch: int


@dataclass(frozen=True)
class Prediction:
    """What is expected of a run under way.

    Attributes:
        stage_s: seconds of one item in one replica of each stage.
        decode_s: CPU seconds of one item in the decode step.
        cpu_s: CPU seconds of one item in all that shares the cores.
        items_per_s: what the narrowest place lets through.
        bottleneck: that place.
    """

    stage_s: tuple[float, ...]
    decode_s: float
    cpu_s: float
    items_per_s: float
    bottleneck: str


def predict(
    config: ModelConfig,
    dtype: Dtype,
    stages: Sequence[StageShape],
    costs: ModelCosts,
    host_costs: HostCosts,
    mix: DataMix,
    host: Host,
) -> Prediction:
    """Predict the throughput of a cut.

    Args:
        config: the model.
        dtype: compute dtype.
        stages: the cut, and what runs it.
        costs: seconds of the layers in one replica.
        host_costs: CPU seconds of the work around them.
        mix: what the items hold.
        host: the machine.
    """
    costs = costs.at_tokens(mix.caption_tokens, config)
    stage_s = tuple(stage_seconds(config, dtype, stage.spec, costs, mix, host.rows_per_batch) for stage in stages)
    decode_s = host_costs.decode_s(mix)
    cpu_s = host_costs.item_s(mix) + sum(
        seconds * stage.num_threads for seconds, stage in zip(stage_s, stages, strict=True)
    )
    rates = {
        f"stage {index}": stage.num_replicas * stage.share / seconds
        for index, (seconds, stage) in enumerate(zip(stage_s, stages, strict=True))
    }
    if decode_s:
        rates["decode"] = host.num_decoders / decode_s
    if host.num_cores is not None:
        rates["shared cores"] = host.num_cores / cpu_s
    bottleneck = min(rates, key=lambda name: rates[name])
    return Prediction(stage_s, decode_s, cpu_s, rates[bottleneck], bottleneck)


def stage_seconds(
    config: ModelConfig, dtype: Dtype, spec: ShardSpec, costs: ModelCosts, mix: DataMix, rows_per_batch: int
) -> float:
    """Seconds of one item in a stage: its layers, half of each hand-over at its two ends, its part of a call."""
    layers_s = mix.images_per_item * costs.vision.of(spec.vision, config.vision.depth)
    layers_s += mix.captions_per_item * costs.text.of(spec.text, config.text.num_hidden_layers)
    passing = mix.images_per_item * sum(
        cut_bytes_per_image(config, layer, dtype) for layer in (spec.vision.start, spec.vision.stop)
    )
    passing += mix.captions_per_item * sum(
        cut_bytes_per_caption(config, layer, dtype, mix.caption_tokens) for layer in (spec.text.start, spec.text.stop)
    )
    return layers_s + passing * costs.send_s_per_byte / 2 + costs.call_s / rows_per_batch
