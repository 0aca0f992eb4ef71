"""Configuration of a stage's replica; apart from the stage, which needs torch."""

from dataclasses import dataclass

from shards.plan import ShardSpec


@dataclass(frozen=True)
class StageSpec:
    """Configuration of one replica of a stage.

    Attributes:
        index: number of the stage.
        model: folder or URI.
        shard: layers of both towers.
        dtype: compute dtype.
        device: torch device.
        num_threads: torch threads.
        batch_sizes: candidates in rows; among several, the stage finds the best one by trial.
        niceness: added to that of the process: its priority among the processes on the same cores.
    """

    index: int
    model: str
    shard: ShardSpec
    dtype: str
    device: str
    num_threads: int
    batch_sizes: tuple[int, ...]
    niceness: int = 0
