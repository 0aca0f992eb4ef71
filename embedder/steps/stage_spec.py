"""What one replica of a stage is told when it starts; apart from the stage, which needs torch."""

from dataclasses import dataclass

from shards.plan import ShardSpec


@dataclass(frozen=True)
class StageSpec:
    """What one replica of a stage is told when it starts.

    Attributes:
        index: of the stage.
        model: folder or URI.
        shard: its layers of both towers.
        dtype: compute dtype.
        device: torch device.
        num_threads: of torch.
        batch_sizes: rows that it may compute together; of several, it finds the best one itself.
        niceness: steps that its process gives way to others on the same cores.
    """

    index: int
    model: str
    shard: ShardSpec
    dtype: str
    device: str
    num_threads: int
    batch_sizes: tuple[int, ...]
    niceness: int = 0
