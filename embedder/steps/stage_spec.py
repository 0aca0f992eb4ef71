"""What one replica of a stage is told when it starts; apart from the stage, which needs torch."""

from dataclasses import dataclass

from shards.plan import ShardSpec


@dataclass(frozen=True)
class StageSpec:
    """What one replica of a stage is told when it starts."""

    index: int
    model: str
    shard: ShardSpec
    dtype: str
    device: str
    num_threads: int
    rows_per_batch: int
