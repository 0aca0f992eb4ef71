"""Where to cut: the plan of a cut, and the planner that balances the estimated operations. Pure; no torch."""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from pydantic import TypeAdapter, ValidationError

from shards.config import ModelConfig, describe
from shards.costs import (
    Dtype,
    TowerCosts,
    cut_bytes_per_caption,
    cut_bytes_per_image,
    text_costs,
    vision_costs,
    weight_bytes,
)
from shards.errors import ModelError
from shards.ranges import STRICT, LayerRange, ShardSpec, check_spec

__all__ = ["LayerRange", "PlannedStage", "ShardPlan", "ShardSpec", "check_plan", "plan_shards", "plan_specs"]

Cut = tuple[int, int]  # layers of the vision and of the text tower that lie before it

# Sums of the same costs in another order differ in the last digits; what is this close counts as equal.
TIE = 1e-9

# A cut whose stages all hold both towers may be this much slower than the best: it stays balanced when a batch has
# more pictures or more captions than planned for, and the estimate is no better than this.
MIXED_SLACK = 1.05


@dataclass(frozen=True)
class PlannedStage:
    """One stage: its layers, and what they are estimated to cost.

    Attributes:
        spec: the layers of both towers.
        weight_bytes: of the loaded weights.
        flops_per_image: operations for one picture (one frame of a video).
        flops_per_caption: operations for one caption of the length that was planned for.
        cut_bytes_per_image: bytes of one picture's state that leave the stage.
        cut_bytes_per_caption: bytes of one caption's state that leave the stage.
    """

    __pydantic_config__ = STRICT

    spec: ShardSpec
    weight_bytes: int
    flops_per_image: float
    flops_per_caption: float
    cut_bytes_per_image: int
    cut_bytes_per_caption: int


@dataclass(frozen=True)
class ShardPlan:
    """A cut of one model into stages, in order; `model_fingerprint` says which weights it was made for, if known."""

    __pydantic_config__ = STRICT

    model_fingerprint: str | None
    stages: tuple[PlannedStage, ...]

    def to_json(self) -> str:
        """The text of a plan file."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @staticmethod
    def from_json(text: str) -> "ShardPlan":
        """Read a plan file's text.

        Raises:
            ModelError: it is no plan.
        """
        try:
            return TypeAdapter(ShardPlan).validate_json(text)
        except ValidationError as error:
            raise ModelError(f"plan: {describe(error)}; make it anew with `embedder plan --out`") from None


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
    """Cut the model so that the slowest stage does as little as possible.

    Exact, with one preference: the best cut in which every stage holds layers of both towers is taken when it's within
    `MIXED_SLACK` of the best of all. Among equals, the one with more stages that hold both towers, then the one that
    sends fewer bytes, then the one with the most even stages.

    Args:
        config: the model.
        num_stages: stages, from 1 to the layers of both towers together.
        dtype: compute dtype.
        images_per_item: pictures (frames) that an item holds on average.
        captions_per_item: captions that an item holds on average.
        caption_tokens: tokens of a caption.
        model_fingerprint: which weights the plan is for.

    Raises:
        ModelError: there are more stages than layers, or fewer than one.
    """
    num_layers = config.vision.depth + config.text.num_hidden_layers
    if not 1 <= num_stages <= num_layers:
        raise ModelError(
            f"{num_stages} stages: model {config.name!r} has {num_layers} layers, and each stage needs one; "
            f"ask for 1 to {num_layers} stages"
        )

    def sent_bytes(cut: Cut) -> int:
        image_bytes = cut_bytes_per_image(config, cut[0], dtype)
        caption_bytes = cut_bytes_per_caption(config, cut[1], dtype, caption_tokens)
        return round(images_per_item * image_bytes + captions_per_item * caption_bytes)

    vision = _prefix_costs(vision_costs(config).times(images_per_item))
    text = _prefix_costs(text_costs(config, caption_tokens).times(captions_per_item))
    limit = _smallest_limit(vision, text, num_stages)
    if num_stages <= min(config.vision.depth, config.text.num_hidden_layers):
        mixed = _smallest_limit(vision, text, num_stages, least=1)
        limit = mixed if mixed <= limit * MIXED_SLACK else limit
    cuts = _best_cuts(vision, text, num_stages, limit * (1 + TIE), sent_bytes)
    specs = [ShardSpec(LayerRange(start[0], stop[0]), LayerRange(start[1], stop[1])) for start, stop in pairwise(cuts)]
    return plan_specs(config, specs, dtype=dtype, caption_tokens=caption_tokens, model_fingerprint=model_fingerprint)


def plan_specs(
    config: ModelConfig,
    specs: Sequence[ShardSpec],
    *,
    dtype: Dtype = "float32",
    caption_tokens: int = 16,
    model_fingerprint: str | None = None,
) -> ShardPlan:
    """Make the plan of a cut that is given, with its costs.

    Raises:
        ModelError: the specs don't cover the model in order.
    """
    vision, text = vision_costs(config), text_costs(config, caption_tokens)
    stages = tuple(
        PlannedStage(
            spec=spec,
            weight_bytes=weight_bytes(config, spec, dtype),
            flops_per_image=float(vision.of(spec.vision)),
            flops_per_caption=float(text.of(spec.text)),
            cut_bytes_per_image=cut_bytes_per_image(config, spec.vision.stop, dtype),
            cut_bytes_per_caption=cut_bytes_per_caption(config, spec.text.stop, dtype, caption_tokens),
        )
        for spec in specs
    )
    plan = ShardPlan(model_fingerprint, stages)
    check_plan(plan, config)
    return plan


def check_plan(plan: ShardPlan, config: ModelConfig) -> None:
    """Check that the stages hold each layer of both towers once, in order, and at least one each.

    Raises:
        ModelError: they don't.
    """
    specs = [stage.spec for stage in plan.stages]
    for spec in specs:
        check_spec(spec, config)
    for number, spec in enumerate(specs):
        if not len(spec.vision) and not len(spec.text):
            raise ModelError(f"plan: stage {number} holds no layer; leave it out")
    _check_tower("vision", [spec.vision for spec in specs], config.vision.depth)
    _check_tower("text", [spec.text for spec in specs], config.text.num_hidden_layers)


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


def _prefix_costs(costs: TowerCosts) -> list[float]:
    """Operations of the first n layers, for n from 0 to the depth."""
    return [costs.of(LayerRange(0, stop)) for stop in range(costs.depth + 1)]


def _smallest_limit(vision: list[float], text: list[float], num_stages: int, least: int = 0) -> float:
    """The least operations that the slowest stage can do, by bisection to a relative 1e-12.

    Args:
        vision: operations of the first n vision layers, by n.
        text: the same of the text tower.
        num_stages: stages.
        least: layers of each tower that every stage must hold: 0 or 1.
    """
    total = vision[-1] + text[-1]
    low, high = total / num_stages * (1 - 1e-12), total
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if _fits(vision, text, num_stages, middle, least):
            high = middle
        else:
            low = middle
    return high


def _fits(vision: list[float], text: list[float], num_stages: int, limit: float, least: int) -> bool:
    """Whether some cut keeps each stage within the limit.

    `reach[i]` is the most text layers that can be done beside `i` vision layers, -1 for none; more is never worse.
    With `least = 0` stages may stay empty here: where one is, another has two layers to share.
    """
    reach = [0] + [-1] * (len(vision) - 1)
    for num_left in reversed(range(num_stages)):
        last_vision, last_text = len(vision) - 1 - least * num_left, len(text) - 1 - least * num_left
        longer = [-1] * len(vision)
        for start, num_text in enumerate(reach):
            if num_text < 0:
                continue
            for stop in range(start + least, last_vision + 1):
                room = limit - (vision[stop] - vision[start])
                if room < 0:
                    break
                num_done = min(bisect_right(text, text[num_text] + room) - 1, last_text)
                if num_done >= num_text + least:
                    longer[stop] = max(longer[stop], num_done)
        reach = longer
    return reach[-1] == len(text) - 1


def _best_cuts(
    vision: list[float], text: list[float], num_stages: int, limit: float, sent_bytes: Callable[[Cut], int]
) -> list[Cut]:
    """Of the cuts that keep each stage within the limit, the best by `plan_shards`' order, both ends included.

    Dynamic programming over (stages done, cut): what counts beside the limit adds up over the stages.
    """
    end = (len(vision) - 1, len(text) - 1)
    costs: dict[Cut, tuple[int, int, float]] = {(0, 0): (0, 0, 0.0)}
    came_from: list[dict[Cut, Cut]] = []
    for num_left in reversed(range(num_stages)):
        next_costs: dict[Cut, tuple[int, int, float]] = {}
        came_from.append({})
        for start, (num_lacking, num_bytes, squares) in costs.items():
            for stop in _next_cuts(vision, text, start, num_left, limit):
                stage = vision[stop[0]] - vision[start[0]] + text[stop[1]] - text[start[1]]
                lacks = stop[0] == start[0] or stop[1] == start[1]
                sent = 0 if stop == end else sent_bytes(stop)
                cost = (num_lacking + lacks, num_bytes + sent, squares + stage * stage)
                if stop not in next_costs or cost < next_costs[stop]:
                    next_costs[stop] = cost
                    came_from[-1][stop] = start
        costs = next_costs
    return _walk_back(end, came_from)


def _next_cuts(vision: list[float], text: list[float], start: Cut, num_left: int, limit: float) -> Iterator[Cut]:
    """Cuts that may end a stage begun at `start`: within the limit, and the rest fits into the stages left."""
    num_layers = len(vision) + len(text) - 2
    total = vision[-1] + text[-1]
    for num_vision in range(start[0], len(vision)):
        room = limit - (vision[num_vision] - vision[start[0]])
        if room < 0:
            return
        least = total - vision[num_vision] - num_left * limit * (1 + TIE)
        first = max(start[1], bisect_left(text, least - TIE * total))
        for num_text in range(first, bisect_right(text, text[start[1]] + room)):
            stop = (num_vision, num_text)
            num_layers_left = num_layers - num_vision - num_text
            if stop != start and num_layers_left >= num_left and (num_left or num_layers_left == 0):
                yield stop


def _walk_back(end: Cut, came_from: list[dict[Cut, Cut]]) -> list[Cut]:
    cuts = [end]
    for previous in reversed(came_from):
        cuts.append(previous[cuts[-1]])
    return cuts[::-1]
