"""Choice of the engine that runs a job in less time: Ray, or this one process. Pure."""

from dataclasses import dataclass

from embedder.config import RunConfig
from shards.plan import ShardPlan
from shards.planning.costs import STARTUP_S

# Careful guesses of what one core does, in operations and in images per second, and of Ray's part of all work. Their
# error matters only where one process decodes too slowly for all cores.
CORE_FLOPS = 6e10
GPU_FLOPS = 5e12  # a small GPU, in float32
DECODED_PER_S = 400.0
RAY_FACTOR = 1.1


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
    if any(stage.num_gpus or stage.replicas.max > 1 for stage in config.stage):
        return EngineChoice("ray", "stages ask for GPUs or replicas")
    if "cuda" in config.devices:
        return EngineChoice("ray", 'stages ask for device = "cuda"')
    if config.devices != {"cpu"} and any(stage.num_gpus for stage in plan.stages):
        return EngineChoice("ray", "the plan places stages on GPUs")
    encode_s = sum(stage.flops_per_image + stage.flops_per_caption for stage in plan.stages) / CORE_FLOPS
    decode_s = 1 / DECODED_PER_S
    shared_s = (encode_s + decode_s) / num_cpus
    local_s = num_items * max(shared_s, decode_s)
    on_gpus = num_gpus if "auto" in config.devices else 0
    if on_gpus:
        shared_s = max(decode_s / num_cpus, encode_s * CORE_FLOPS / GPU_FLOPS / on_gpus)
    ray_s = STARTUP_S + num_items * shared_s * RAY_FACTOR
    reason = (
        f"{num_items:,} items are about {local_s:.0f} s in one process and {ray_s:.0f} s on Ray"
        f"{f' with {on_gpus} GPU(s)' if on_gpus else ''}, its start included"
    )
    return EngineChoice("local" if local_s <= ray_s else "ray", reason)
