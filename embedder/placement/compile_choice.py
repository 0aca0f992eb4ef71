"""Whether a stage's layers are compiled: if the configuration says so, or the run is long enough. Pure.

Compiled, a ViT-L/14 with its captions computes in 0.81 of the time on an H200; its layers compile in 6.5 s, and those
of the text tower, in both forms, in 4.5 s. What an earlier run has left in a node's cache isn't known here, so a short
run that `auto` does not compile may still gain from `compile = true`.
"""

from collections.abc import Collection
from dataclasses import replace

from embedder.config import ComputeSettings
from embedder.placement.allocation import StageResources
from embedder.placement.device_settings import USUAL_GPU, gpu_type
from shards.model_config import ModelConfig
from shards.plan import PlannedStage
from shards.planning.planning_costs import ModelCosts

GAIN = 1.23
"""Rate of compiled layers relative to eager ones, in half precision: 1.23 to 1.27 on an H100 and an H200."""
COMPILE_S = 6.0
"""Seconds to compile a layer in one form."""
VISION_FORMS, TEXT_FORMS = 1, 2
"""Forms of a layer: captions come with and without a mask."""


def is_compiled(
    compute: ComputeSettings,
    stage: PlannedStage,
    resources: StageResources,
    num_items: int | None,
    gpus: Collection[str],
) -> bool:
    """Decide whether a stage compiles its layers; those in int8 are never compiled, and on CPUs only if asked for.

    `num_items` is the number of items to embed, if known. Of several GPU types (`gpus`), the fastest counts.
    """
    if compute.settled_dtype == "int8" or compute.compile is False:
        return False
    if compute.compile is True:
        return True
    if resources.device != "cuda" or num_items is None:
        return False
    item_s = stage.seconds_per_item or estimated_s(stage, compute.settled_dtype, gpus)
    compute_s = num_items * item_s / resources.max_replicas
    return repays(compute_s, has_vision=len(stage.spec.vision) > 0, has_text=len(stage.spec.text) > 0)


def estimated_s(stage: PlannedStage, dtype: str, gpus: Collection[str]) -> float:
    """Estimate a replica's seconds for an image with its caption, by operations; 0 in a dtype without rates.

    Without any GPU types (`gpus`), a usual one is assumed.
    """
    rate = max(gpu_type(name).flops.get(dtype, 0.0) for name in gpus or (USUAL_GPU,))
    return (stage.flops_per_image + stage.flops_per_caption) / rate if rate else 0.0


def repays(compute_s: float, *, has_vision: bool, has_text: bool) -> bool:
    """Whether compiling takes less time than it saves; `compute_s` is a replica's total with eager layers."""
    num_forms = VISION_FORMS * has_vision + TEXT_FORMS * has_text
    return compute_s * (1 - 1 / GAIN) > num_forms * COMPILE_S


def as_compiled(costs: ModelCosts, compute: ComputeSettings, config: ModelConfig) -> ModelCosts:
    """Lower the seconds of eager layers to those of a long run, if that compiles them on a GPU in half precision."""
    is_cpu = costs.device.lower().startswith("cpu")
    if is_cpu or compute.compile is False or costs.dtype not in ("bfloat16", "float16") or config.is_one_tower:
        return costs
    vision, text = (each.scale(1.0, 1 / GAIN, 1.0) for each in (costs.vision, costs.text))
    return replace(costs, vision=vision, text=text)
