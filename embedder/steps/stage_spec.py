"""Configuration of one replica of a stage; importing it loads no torch."""

from dataclasses import dataclass, replace

from shards.length_groups import GroupCosts
from shards.shard_specs import ShardSpec


@dataclass(frozen=True)
class StageSpec:
    """Configuration of one replica of a stage.

    `model` is a folder or URI. Among several `batch_sizes`, in rows, the stage finds the best one by trial. `niceness`
    is added to that of the process, to lower its priority on shared cores. `gpu_share` is the part of a GPU's memory
    that it may take. `group_costs` decide, by side, on groups of rows of similar length; a CPU's apply if a side is
    missing. `compile` compiles the layers with the first batch. Of `calls_at_once` calls, as many run together as a
    trial finds best; None sets no limit. On a cluster, `node_threads` has torch threads by Ray's node id; other nodes
    use `num_threads`.
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
    calls_at_once: int | None = None
    node_threads: tuple[tuple[str, int], ...] = ()

    def on_this_node(self) -> "StageSpec":
        """Return the specification with the threads of the node where this process runs."""
        if not self.node_threads:
            return self
        import ray

        node_id = ray.get_runtime_context().get_node_id()
        return replace(self, num_threads=dict(self.node_threads).get(node_id, self.num_threads))
