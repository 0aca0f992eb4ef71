"""Which engine serves a run best: Ray, or this one process. Pure."""

from dataclasses import dataclass

from embedder.config import RunConfig
from shards.plan import ShardPlan

# What Ray costs before the first row: its start, the actors' imports, the drain at the end.
RAY_STARTUP_S = 15.0
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
    guess = f"{num_items:,} items are about {local_s:.0f} s of work"
    if local_s < RAY_STARTUP_S:
        return Choice("local", f"{guess}, less than Ray's start ({RAY_STARTUP_S:.0f} s)")
    return Choice("ray", f"{guess}, more than Ray's start ({RAY_STARTUP_S:.0f} s)")
