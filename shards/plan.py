"""Plan: the cut of one model into stages, their devices, and the predicted throughput, in a readable file. No torch.

`plan_shards` balances estimated operations; `plan_placement` places stages on devices of known cost.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from shards.costs import Dtype, cut_bytes, tower_costs, weight_bytes
from shards.model_config import ModelConfig
from shards.model_errors import ModelError
from shards.planning.devices import DeviceType
from shards.planning.planning_costs import DataMix, JsonText, estimate_costs
from shards.planning.problem import BOUNDLESS, PlacedStage, PlacementProblem, Pool, StageLoad, predict
from shards.ranges import STRICT, LayerRange
from shards.shard_specs import ShardSpec, check_spec

if TYPE_CHECKING:
    from shards.planning.explain import Alternative

# A cut whose stages all hold both towers may be slower than the best by this factor: it stays balanced when a batch has
# more images or captions than planned for, and estimates by operations are no more precise than this.
MIXED_SLACK = 1.05

# Items of one image and one caption each.
ONE_OF_EACH = DataMix()

# Rules for files that people have edited.
Number = Annotated[int, Field(ge=1)]
Bytes = Annotated[int, Field(ge=0)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class PlannedStage:
    """One stage: its layers, their costs, and its devices.

    On a cluster `device` names a type of nodes, on which a run places the stage's replicas. For nodes with GPUs it is
    the value of their label `cluster.type_label` if they have it, else Ray's GPU type ("L4", as in the resource
    `accelerator_type:L4`). For nodes without GPUs it is the value of that label, or "CPU" where there is only one kind
    of them: such a stage may run on any node.

    Attributes:
        flops_per_image: operations for one image (one frame of a video).
        flops_per_caption: operations for one caption of the planned length.
        cut_bytes_per_image: bytes of one image's state that leave the stage.
        cut_bytes_per_caption: bytes of one caption's state that leave the stage.
        device: type of the devices, see above; None without a fleet.
        num_replicas: replicas needed for the predicted throughput.
        num_gpus: GPUs (or the part of one) of each replica; 0 on CPUs; None without a fleet.
        num_threads: torch threads of each replica on CPUs.
        seconds_per_item: seconds of one replica per item, including its share of the transfers.
        memory_bytes: memory of one replica: weights, activations of a batch, workspace.
    """

    __pydantic_config__ = STRICT

    spec: ShardSpec
    weight_bytes: Bytes
    flops_per_image: Amount
    flops_per_caption: Amount
    cut_bytes_per_image: Bytes
    cut_bytes_per_caption: Bytes
    device: str | None = None
    num_replicas: Number = 1
    num_gpus: Amount | None = None
    num_threads: Number | None = None
    seconds_per_item: Amount | None = None
    memory_bytes: Bytes | None = None


@dataclass(frozen=True)
class ShardPlan(JsonText):
    """A cut of one model into stages, in order, with the prediction; its `mix` has means over the items.

    `costs` are "measured" or "estimated", None where only operations were balanced. `bottleneck` is "stage 1",
    "decode", "shared cores", "cores of" a type of nodes, or "Ray's driver"; `reasons` are throughputs with one stage
    fewer and one more.
    """

    __pydantic_config__ = STRICT
    text_kind = "plan"
    text_cure = "make it again with `embedder plan --out`"

    model_fingerprint: str | None
    stages: Annotated[tuple[PlannedStage, ...], Field(min_length=1)]
    mix: DataMix | None = None
    dtype: str | None = None
    costs: str | None = None
    items_per_s: float | None = None
    bottleneck: str | None = None
    reasons: tuple[str, ...] = ()


def plan_shards(
    config: ModelConfig,
    num_stages: int = 3,
    *,
    dtype: Dtype = "float32",
    mix: DataMix = ONE_OF_EACH,
    model_fingerprint: str | None = None,
) -> ShardPlan:
    """Cut the model so that the slowest stage does as few operations as possible, on equal devices, one per stage.

    The result is exact, with one preference: the best cut in which every stage holds layers of both towers wins if it's
    within `MIXED_SLACK` of the best of all. Ties go to more stages that hold both towers, then to fewer bytes sent,
    then to more even stages. Raises a ModelError for fewer stages than one or more than layers of both towers together.
    """
    from shards.planning.solver.throughput_search import best_placement

    _check_num_stages(config, num_stages)
    mix, config = mix.of_towers(config), config.at_patches(mix.image_patches)
    problem = PlacementProblem(config, dtype, mix, (_equal_devices(config, num_stages, dtype, mix.caption_tokens),))
    best = best_placement(problem, num_stages)
    if best is not None and num_stages <= min(problem.cut_depths):
        mixed = best_placement(problem, num_stages, min_layers=1, min_items_per_s=best.items_per_s / MIXED_SLACK)
        best = mixed or best
    if best is None:
        raise RuntimeError("every model can be cut where nothing limits its stages")
    specs = [stage.spec for stage in best.stages]
    return plan_specs(
        config, specs, dtype=dtype, caption_tokens=mix.caption_tokens, model_fingerprint=model_fingerprint
    )


def plan_specs(
    config: ModelConfig,
    specs: Sequence[ShardSpec],
    *,
    dtype: Dtype = "float32",
    caption_tokens: int = 16,
    model_fingerprint: str | None = None,
) -> ShardPlan:
    """Make the plan of a given cut, with its operations and bytes; raises a ModelError if it isn't the whole model."""
    stages = tuple(_bare_stage(config, spec, dtype, caption_tokens) for spec in specs)
    plan = ShardPlan(model_fingerprint, stages, dtype=dtype)
    check_plan(plan, config)
    return plan


@dataclass(frozen=True)
class PlacedPlan:
    """A placed plan, and the plans with one stage fewer and one more, as far as the model can be cut so."""

    plan: ShardPlan
    alternatives: "tuple[Alternative, ...]"


def plan_placement(problem: PlacementProblem, num_stages: int, *, model_fingerprint: str | None = None) -> ShardPlan:
    """Cut the model and place its stages for the highest throughput.

    Ties go to more stages that hold both towers, then to fewer bytes over the cuts, then to more even stages. Raises a
    ModelError if no placement can run; the message names the nearest that can.
    """
    return place(problem, num_stages, model_fingerprint=model_fingerprint).plan


def place(problem: PlacementProblem, num_stages: int, *, model_fingerprint: str | None = None) -> PlacedPlan:
    """Place the stages as `plan_placement` does, and report what one stage fewer and one more would bring."""
    # The solver needs NumPy; reading plans doesn't.
    from shards.planning.explain import explain_refusal, find_alternative
    from shards.planning.solver.throughput_search import best_placement

    _check_num_stages(problem.config, num_stages)
    placement = best_placement(problem, num_stages)
    if placement is None:
        raise ModelError(explain_refusal(problem, num_stages))
    prediction = predict(problem, placement.stages)
    neighbours = [find_alternative(problem, num_stages + step, prediction.items_per_s) for step in (-1, 1)]
    alternatives = tuple(each for each in neighbours if each is not None)
    plan = ShardPlan(
        model_fingerprint=model_fingerprint,
        stages=tuple(
            _plan_stage(problem, stage, load) for stage, load in zip(placement.stages, prediction.loads, strict=True)
        ),
        mix=problem.mix,
        dtype=problem.dtype,
        costs="measured" if all(pool.costs.source == "measured" for pool in problem.pools) else "estimated",
        items_per_s=prediction.items_per_s,
        bottleneck=prediction.bottleneck,
        reasons=tuple(str(each) for each in alternatives),
    )
    return PlacedPlan(plan, alternatives)


def check_plan(plan: ShardPlan, config: ModelConfig) -> None:
    """Raise a ModelError unless the stages hold each layer of both towers once, in order, each at least one.

    A replica has whole GPUs, or a part of one.
    """
    specs = [stage.spec for stage in plan.stages]
    for spec in specs:
        check_spec(spec, config)
    for number, spec in enumerate(specs):
        if not len(spec.vision) and not len(spec.text):
            raise ModelError(f"plan: stage {number} holds no layer; leave it out")
    for number, stage in enumerate(plan.stages):
        if (num_gpus := stage.num_gpus or 0) > 1 and num_gpus % 1:
            raise ModelError(
                f"plan: stage {number}: num_gpus = {num_gpus:g}; a replica has whole GPUs or a part of one: write "
                f"{math.floor(num_gpus)} or {math.ceil(num_gpus)}"
            )
    for side, depth in config.num_layers.items():
        _check_tower(side, [spec.layers_of(side) for spec in specs], depth)


def _bare_stage(config: ModelConfig, spec: ShardSpec, dtype: Dtype, caption_tokens: int) -> PlannedStage:
    """Make a stage with only the costs that hold on any device: operations and bytes."""
    return PlannedStage(
        spec=spec,
        weight_bytes=weight_bytes(config, spec, dtype),
        flops_per_image=float(tower_costs(config, "vision", caption_tokens).of(spec.vision)),
        flops_per_caption=float(tower_costs(config, "text", caption_tokens).of(spec.text)),
        cut_bytes_per_image=cut_bytes(config, "vision", spec.vision.stop, dtype, caption_tokens),
        cut_bytes_per_caption=cut_bytes(config, "text", spec.text.stop, dtype, caption_tokens),
    )


def _check_num_stages(config: ModelConfig, num_stages: int) -> None:
    """Raise a ModelError unless each stage can hold at least one layer."""
    # One tower for both sides is cut only along its own layers.
    num_layers = config.num_layers["vision"] if config.is_one_tower else sum(config.num_layers.values())
    if not 1 <= num_stages <= num_layers:
        raise ModelError(
            f"num_stages = {num_stages}: each stage needs a layer, and model {config.name!r} has "
            f"{num_layers}; ask for 1 to {num_layers}"
        )


def _plan_stage(problem: PlacementProblem, stage: PlacedStage, load: StageLoad) -> PlannedStage:
    return replace(
        _bare_stage(problem.config, stage.spec, problem.dtype, problem.mix.caption_tokens),
        device=stage.pool.device.name,
        num_replicas=stage.num_replicas,
        num_gpus=stage.num_gpus,
        num_threads=stage.pool.num_threads if stage.pool.device.kind == "cpu" else None,
        seconds_per_item=load.seconds,
        memory_bytes=load.memory_bytes,
    )


def _equal_devices(config: ModelConfig, num: int, dtype: Dtype, caption_tokens: int) -> Pool:
    """Make a pool of whole devices that do one operation per second and transfer at no cost."""
    device = DeviceType("any", "gpu", {dtype: 1.0}, BOUNDLESS, 1.0)
    costs = replace(
        estimate_costs(config, device, dtype, caption_tokens),
        send_s_per_byte=0.0,
        call_s=0.0,
        workspace_bytes_per_image=0,
        workspace_bytes_per_caption=0,
    )
    return Pool(num, device, costs, max_shares=1)


def _check_tower(tower: str, ranges: Sequence[LayerRange], depth: int) -> None:
    expected = 0
    for number, layers in enumerate(ranges):
        if layers.start != expected:
            raise ModelError(
                f"plan: {tower} layers of stage {number} start at {layers.start}, expected {expected}; "
                "each layer belongs to one stage, in order"
            )
        expected = layers.stop
    if expected != depth:
        raise ModelError(f"plan: {tower} layers end at {expected}, the model has {depth}; the last stage ends there")
