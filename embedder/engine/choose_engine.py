"""Choice of the engine that runs a job in less time: Ray, or this one process. Pure."""

from dataclasses import dataclass

from embedder.config import RunConfig
from embedder.quantities import counted, duration_text
from shards.plan import ShardPlan
from shards.planning.costs import IMAGE_DECODE_S, STARTUP_S
from shards.planning.devices import DEVICES

# The planner's estimates, in float32, on a core and on a small GPU. Their error matters only where one process decodes
# too slowly for all cores.
CORE_FLOPS, GPU_FLOPS = (DEVICES[name].flops_in("float32") for name in ("CPU", "T4"))
RAY_FACTOR = 1.1  # Ray's part of all work


@dataclass(frozen=True)
class EngineChoice:
    """Engine, and the reason for it."""

    engine: str
    reason: str


def choose_engine(config: RunConfig, plan: ShardPlan, num_items: int, num_cpus: int, num_gpus: int = 0) -> EngineChoice:
    """Follow the configuration; for `auto`, take the faster engine, Ray's start included.

    In one process all cores encode, but one alone decodes: many cores would wait for it, and Ray's tasks decode on all.
    Stages compute on GPUs through Ray only, which assigns them.

    Args:
        config: configuration of the run.
        plan: shards, with operations for an image and a caption.
        num_items: items to embed, each counted as one image with a caption.
        num_cpus: CPUs of this machine.
        num_gpus: GPUs of this machine.
    """
    if config.engine != "auto":
        return EngineChoice(config.engine, "as configured")
    if config.ray_address is not None:
        return EngineChoice("ray", f"a cluster was given: {config.ray_address}")
    if any(stage.num_gpus or (stage.replicas != "auto" and stage.replicas.max > 1) for stage in config.stage):
        return EngineChoice("ray", "stages ask for GPUs or replicas")
    if "cuda" in config.devices:
        return EngineChoice("ray", 'stages ask for device = "cuda"')
    if config.devices != {"cpu"} and any(stage.num_gpus for stage in plan.stages):
        return EngineChoice("ray", "the plan places stages on GPUs")
    flops = sum(stage.flops_per_image + stage.flops_per_caption for stage in plan.stages)
    shared_s = (flops / CORE_FLOPS + IMAGE_DECODE_S) / num_cpus
    local_s = num_items * max(shared_s, IMAGE_DECODE_S)
    on_gpus = num_gpus if "auto" in config.devices else 0
    if on_gpus:
        shared_s = max(IMAGE_DECODE_S / num_cpus, flops / GPU_FLOPS / on_gpus)
    ray_s = STARTUP_S + num_items * shared_s * RAY_FACTOR
    gpus = f" with {counted(on_gpus, 'GPU')}" if on_gpus else ""
    reason = (
        f"{counted(num_items, 'item')} would take about {duration_text(round(local_s))} in one process and "
        f"{duration_text(round(ray_s))} on Ray{gpus}, its start included"
    )
    return EngineChoice("local" if local_s <= ray_s else "ray", reason)
