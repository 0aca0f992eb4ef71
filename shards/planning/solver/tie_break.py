"""Choice among the paths that are as fast as the best one. NumPy."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shards.planning.problem import PlacementProblem
from shards.planning.solver.feasibility import narrowed, parts_at, with_total_price
from shards.planning.solver.label_setting import Steps, best_within
from shards.planning.solver.resources import TIE, Floats, Ints, Resources, Stages, replicas_for

LACK = 1 << 50  # rank of a stage without one of the towers; more than all bytes that an item could have


@dataclass(frozen=True)
class Placement:
    """Cut and placement.

    Attributes:
        items_per_s: throughput.
        cuts: (vision layers, text layers) before each stage and after the last.
        pools: number of the pool that each stage runs on.
        devices: devices of its pool that each stage takes; on shared cores, its replicas.
    """

    items_per_s: float
    cuts: tuple[tuple[int, int], ...]
    pools: tuple[int, ...]
    devices: tuple[float, ...]


def preferable(resources: Resources, steps: Steps, best: Stages, rate: float, prices: Floats) -> Placement:
    """Prefer more stages that hold both towers, then fewer bytes over the cuts, then more even stages.

    Args:
        resources: the resources of the problem.
        steps: stages among which all the fastest paths are.
        best: one of these paths.
        rate: items per second that it reaches.
        prices: (R,), with which steps that can't fit are excluded.
    """
    rate *= 1 - TIE
    uses = parts_at(steps, resources, rate)
    left, numbers = narrowed(steps, uses, prices)
    rank, unevenness = _rank(resources.problem, left.stages), _unevenness(resources, left.stages, rate)
    path = left.preferred(rank, unevenness)
    if path is None or not np.all(uses[:, numbers[path]].sum(axis=1) <= 1 + TIE):
        path = best_within(left, with_total_price(uses[:, numbers], prices), rank, unevenness)
    return _placement(resources, best if path is None else left.stages.take(path), rate)


def _rank(problem: PlacementProblem, stages: Stages) -> Ints:
    """Rank of each stage, (E,): whether it lacks a tower, then the bytes that leave it for the next."""
    vision_depth, text_depth = problem.depths
    vision_start, text_start = np.divmod(stages.start, text_depth + 1)
    vision_stop, text_stop = np.divmod(stages.stop, text_depth + 1)
    lacks = (vision_start == vision_stop) | (text_start == text_stop)
    image_bytes = np.array([problem.image_bytes(layer) for layer in range(vision_depth + 1)])
    caption_bytes = np.array([problem.caption_bytes(layer) for layer in range(text_depth + 1)])
    sent = np.rint(image_bytes[vision_stop] + caption_bytes[text_stop]).astype(np.int64)
    at_end = (vision_stop == vision_depth) & (text_stop == text_depth)
    rank: Ints = LACK * lacks.astype(np.int64) + np.where(at_end, 0, sent)
    return rank


def _unevenness(resources: Resources, stages: Stages, rate: float) -> Floats:
    """Squares of the seconds that an item takes in a stage with all its devices, (E,)."""
    devices = np.where(_is_shared(resources, stages), 1.0, _devices(resources, stages, rate))
    squares: Floats = (stages.seconds / devices) ** 2
    return squares


def _devices(resources: Resources, stages: Stages, rate: float) -> Floats:
    """Devices that each stage takes, (E,); on shared cores, its replicas."""
    taken = resources.of(stages, rate)[stages.pool, np.arange(len(stages))]
    replicas = np.maximum(1.0, replicas_for(rate * stages.seconds))
    return np.where(_is_shared(resources, stages), replicas, taken)


def _is_shared(resources: Resources, stages: Stages) -> NDArray[np.bool_]:
    return np.array([pool.shared for pool in resources.problem.pools])[stages.pool]


def _placement(resources: Resources, stages: Stages, rate: float) -> Placement:
    num_text_cuts = resources.problem.depths[1] + 1
    cuts = [divmod(int(cut), num_text_cuts) for cut in (*stages.start, stages.stop[-1])]
    return Placement(
        items_per_s=resources.best_rate(stages, rate, 2 * rate),
        cuts=tuple(cuts),
        pools=tuple(int(pool) for pool in stages.pool),
        devices=tuple(float(count) for count in _devices(resources, stages, rate)),
    )
