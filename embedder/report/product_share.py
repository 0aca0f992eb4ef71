"""How close the layers of a stage come to what its GPU reaches in wide matrix products. Pure."""

from collections.abc import Sequence

from embedder.report.report_schema import LoadReport, StepReport
from shards.costs import tower_costs
from shards.model_config import ModelConfig
from shards.planning.planning_costs import DataMix, DeviceSpeed
from shards.shard_specs import ShardSpec


def slowest_speed(loads: Sequence[LoadReport], stage: int | None = None) -> DeviceSpeed | None:
    """Return the measured speed of a stage's slowest GPU, or of all stages'; None if none was measured."""
    speeds = [DeviceSpeed(**load.device_speed) for load in loads if load.device_speed and stage in (None, load.stage)]
    return min(speeds, key=lambda speed: speed.product_flops, default=None)


def product_shares(
    steps: Sequence[StepReport],
    loads: Sequence[LoadReport],
    shards: Sequence[ShardSpec],
    config: ModelConfig,
    mix: DataMix,
    num_items: int,
) -> dict[str, float]:
    """Return the share of the matrix-product rate that each stage reached whose GPU was measured.

    None where pictures keep their proportions and nothing says how many patches they had.
    """
    if mix.image_patches is None and config.at_patches(1) != config:
        return {}
    seconds, shares = {step.step: step.wall_s for step in steps}, dict[str, float]()
    for number, shard in enumerate(shards):
        speed, computed_s = slowest_speed(loads, number), seconds.get(f"stage {number}")
        if speed is not None and computed_s:
            reached = item_flops(config, shard, mix) * num_items / computed_s
            shares[f"stage {number}"] = reached / speed.product_flops
    return shares


def item_flops(config: ModelConfig, shard: ShardSpec, mix: DataMix) -> float:
    """Count the operations of a shard for a mean item."""
    numbers = {"vision": mix.images_per_item, "text": mix.captions_per_item}
    return sum(
        number * tower_costs(config, side, mix.caption_tokens).of(shard.layers_of(side))
        for side, number in numbers.items()
        if len(shard.layers_of(side))
    )
