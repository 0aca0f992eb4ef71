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


def with_product_shares(
    steps: Sequence[StepReport],
    loads: Sequence[LoadReport],
    shards: Sequence[ShardSpec],
    config: ModelConfig,
    mix: DataMix,
    num_items: int,
) -> list[StepReport]:
    """Add to each stage whose GPU was measured the share of the matrix-product rate that it reached."""
    numbers = {f"stage {number}": number for number in range(len(shards))}

    def share_of(step: StepReport) -> float | None:
        number = numbers.get(step.step)
        speed = None if number is None else slowest_speed(loads, number)
        if number is None or speed is None or not step.wall_s:
            return None
        return item_flops(config, shards[number], mix) * num_items / (step.wall_s * speed.product_flops)

    return [step.model_copy(update={"product_share": share_of(step)}) for step in steps]


def item_flops(config: ModelConfig, shard: ShardSpec, mix: DataMix) -> float:
    """Count the operations of a shard for a mean item."""
    numbers = {"vision": mix.images_per_item, "text": mix.captions_per_item}
    return sum(
        number * tower_costs(config, side, mix.caption_tokens).of(shard.layers_of(side))
        for side, number in numbers.items()
        if len(shard.layers_of(side))
    )
