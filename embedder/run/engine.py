"""Which engine serves a run best: Ray, or this one process. Pure."""

from dataclasses import dataclass

from embedder.config import RunConfig
from shards.plan import ShardPlan
from shards.planning.costs import STARTUP_S

# A careful guess of what one core does in float32, in operations a second; measured costs come with the planner.
CORE_FLOPS = 3e10


@dataclass(frozen=True)
class Choice:
    """The engine, and why."""

    engine: str
    reason: str


def choose_engine(config: RunConfig, plan: ShardPlan, num_items: int, num_cpus: int) -> Choice:
    """Follow the configuration; for `auto`, take Ray where the work outweighs its start.

    Args:
        config: the run.
        plan: the cut, with operations for a picture and a caption.
        num_items: items to embed, each counted as one picture with a caption.
        num_cpus: CPUs of this machine.
    """
    if config.engine != "auto":
        return Choice(config.engine, "as configured")
    if config.ray_address is not None:
        return Choice("ray", f"a cluster was given: {config.ray_address}")
    if any(stage.num_gpus or stage.replicas.max > 1 for stage in config.stage):
        return Choice("ray", "stages ask for GPUs or replicas")
    if any(stage.num_gpus for stage in plan.stages):
        return Choice("ray", "the plan places stages on GPUs")
    flops = sum(stage.flops_per_image + stage.flops_per_caption for stage in plan.stages)
    local_s = num_items * flops / (CORE_FLOPS * num_cpus)
    return by_work(local_s, f"{num_items:,} items are about {local_s:.0f} s of work")


def by_work(local_s: float, work: str) -> Choice:
    """Ray where the work outweighs its start.

    Args:
        local_s: seconds of the work in this process.
        work: the same in words.
    """
    if local_s < STARTUP_S:
        return Choice("local", f"{work}, less than Ray's start ({STARTUP_S:.0f} s)")
    return Choice("ray", f"{work}, more than Ray's start ({STARTUP_S:.0f} s)")
