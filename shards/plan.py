"""Public functions of the planner: cut a model into stages, and place them on devices. Pure; no torch.

`plan_shards` balances estimated operations; `plan_placement` places stages on devices whose costs are known.
"""

from collections.abc import Sequence

from shards.config import ModelConfig
from shards.costs import Dtype, TowerCosts, text_costs, vision_costs
from shards.planning.costs import ModelCosts, TowerSeconds
from shards.planning.devices import DeviceType
from shards.planning.planner import BOUNDLESS, bare_stage, check_num_stages, plan_of, plan_placement, specs_between
from shards.planning.plans import PlannedStage, ShardPlan, check_plan
from shards.planning.problem import PlacementProblem, Pool
from shards.planning.workload import DataMix
from shards.ranges import LayerRange, ShardSpec

__all__ = [
    "MIXED_SLACK",
    "DataMix",
    "LayerRange",
    "PlannedStage",
    "ShardPlan",
    "ShardSpec",
    "check_plan",
    "plan_of",
    "plan_placement",
    "plan_shards",
    "plan_specs",
]

# A cut whose stages all hold both towers may be slower than the best by this factor: it stays balanced when a batch has
# more images or more captions than planned for, and operations are no better an estimate than this.
MIXED_SLACK = 1.05


def plan_shards(
    config: ModelConfig,
    num_stages: int = 3,
    *,
    dtype: Dtype = "float32",
    images_per_item: float = 1.0,
    captions_per_item: float = 1.0,
    caption_tokens: int = 16,
    model_fingerprint: str | None = None,
) -> ShardPlan:
    """Cut the model so that the slowest stage does as few operations as possible, for equal devices, one per stage.

    Exact, with one preference: the best cut in which every stage holds layers of both towers is taken when it's within
    `MIXED_SLACK` of the best of all. Among equals, the one with more stages that hold both towers, then the one that
    sends fewer bytes, then the one with the most even stages.

    Args:
        config: the model.
        num_stages: number of stages, from 1 to the layers of both towers together.
        dtype: compute dtype.
        images_per_item: mean number of images (frames) of an item.
        captions_per_item: mean number of captions of an item.
        caption_tokens: tokens of a caption.
        model_fingerprint: fingerprint of the weights that the plan is for.

    Raises:
        ModelError: there are more stages than layers, or fewer than one; or a mean is negative, or all are 0.
    """
    from shards.planning.solver.search import best_placement

    check_num_stages(config, num_stages)
    mix = DataMix(images_per_item, captions_per_item, caption_tokens)
    problem = PlacementProblem(config, dtype, mix, (_equal_devices(config, num_stages, dtype, caption_tokens),))
    best = best_placement(problem, num_stages)
    if best is not None and num_stages <= min(problem.depths):
        mixed = best_placement(problem, num_stages, min_layers=1, min_items_per_s=best.items_per_s / MIXED_SLACK)
        best = mixed or best
    if best is None:
        raise RuntimeError("every model can be cut where nothing limits its stages")
    specs = specs_between(best.cuts)
    return plan_specs(config, specs, dtype=dtype, caption_tokens=caption_tokens, model_fingerprint=model_fingerprint)


def plan_specs(
    config: ModelConfig,
    specs: Sequence[ShardSpec],
    *,
    dtype: Dtype = "float32",
    caption_tokens: int = 16,
    model_fingerprint: str | None = None,
) -> ShardPlan:
    """Make the plan of a given cut, with its operations and bytes.

    Args:
        config: the model.
        specs: the layers of each stage, in order.
        dtype: compute dtype.
        caption_tokens: tokens of a caption.
        model_fingerprint: fingerprint of the weights that the plan is for.

    Raises:
        ModelError: the specs don't cover the model in order.
    """
    stages = tuple(bare_stage(config, spec, dtype, caption_tokens) for spec in specs)
    plan = ShardPlan(model_fingerprint, stages, dtype=dtype)
    check_plan(plan, config)
    return plan


def _equal_devices(config: ModelConfig, num: int, dtype: Dtype, caption_tokens: int) -> Pool:
    """Pool of whole devices that do one operation per second and transfer at no cost."""
    device = DeviceType("any", "gpu", {dtype: 1.0}, BOUNDLESS, 1.0)
    vision, text = _operations(vision_costs(config)), _operations(text_costs(config, caption_tokens))
    costs = ModelCosts(None, device.name, dtype, "estimated", caption_tokens, vision, text, 0.0, 0.0, 0, 0)
    return Pool(num, device, costs, max_shares=1)


def _operations(costs: TowerCosts) -> TowerSeconds:
    return TowerSeconds(costs.front, costs.layer, costs.head)
