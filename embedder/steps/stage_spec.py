"""Configuration of one replica of a stage; importing it loads no torch."""

from dataclasses import dataclass, replace

from shards.length_groups import GroupCosts
from shards.shard_specs import ShardSpec


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
        niceness: added to that of the process, to lower its priority on shared cores.
        gpu_share: part of a GPU's memory that it may take.
        group_costs: by side, costs that decide on groups of rows of similar length; a CPU's if a side is missing.
        compile: whether the layers are compiled, with the first batch.
        node_threads: on a cluster, torch threads by Ray's node id; other nodes use `num_threads`.
    """

    index: int
    model: str
    shard: ShardSpec
    dtype: str
    device: str
    num_threads: int
    batch_sizes: tuple[int, ...]
    niceness: int = 0
    gpu_share: float = 1.0
    group_costs: tuple[tuple[str, GroupCosts], ...] = ()
    compile: bool = False
    node_threads: tuple[tuple[str, int], ...] = ()

    def on_this_node(self) -> "StageSpec":
        """Return the specification with the threads of the node where this process runs."""
        if not self.node_threads:
            return self
        import ray

        node_id = ray.get_runtime_context().get_node_id()
        return replace(self, num_threads=dict(self.node_threads).get(node_id, self.num_threads))
