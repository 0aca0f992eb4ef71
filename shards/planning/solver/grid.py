"""All stages that a model allows, as arrays: ranges of one tower combined with ranges of the other.

A stage's seconds, bytes and weights are sums of a part that depends on its vision layers and one that depends on its
text layers, so a grid of all stages is an outer sum.

Legend: `V` ranges of vision layers, `T` ranges of text layers; arrays of stages are (V, T).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shards.costs import weight_bytes
from shards.planning.devices import GPU_CALLS
from shards.planning.planning_costs import ModelCosts, TowerSeconds
from shards.planning.problem import PlacementProblem, Pool
from shards.planning.solver.capacities import Floats, Ints, StageCosts, Stages, smallest_part
from shards.shard_specs import ShardSpec

Flags = NDArray[np.bool_]

BLOCK_CELLS = 10_000  # stages computed together, so that intermediate values stay in a core's cache


@dataclass(frozen=True)
class LayerRanges:
    """All ranges of one tower's layers between the considered cuts, ordered by start, then stop (exclusive): (V,)."""

    depth: int
    starts: Ints
    stops: Ints

    @staticmethod
    def between(cuts: Sequence[int], min_layers: int) -> "LayerRanges":
        """Make all ranges of at least `min_layers` layers that start and stop at the cuts; the last is the depth."""
        found = [(start, stop) for start in cuts for stop in cuts if stop - start >= min_layers]
        starts, stops = np.array(found, dtype=np.int64).reshape(-1, 2).T
        return LayerRanges(cuts[-1], starts, stops)

    def part(self, which: slice) -> "LayerRanges":
        """Take a slice of the ranges."""
        return LayerRanges(self.depth, self.starts[which], self.stops[which])

    @property
    def num_layers(self) -> Ints:
        """Number of layers of each range, (V,)."""
        return self.stops - self.starts

    def passing(self, bytes_at: Sequence[float]) -> Floats:
        """Return the bytes that enter and leave each range, (V,), given those at each cut."""
        table: Floats = np.array(bytes_at)
        return table[self.starts] + table[self.stops]

    def seconds(self, costs: TowerSeconds, shares: tuple[float, ...]) -> Floats:
        """Return the seconds of one input, (V,); `shares` are those of `Tower.layer_shares`."""
        layers = self.sums(shares) if shares else self.num_layers
        return self.total(costs.front_s, costs.layer_s * layers, costs.head_s)

    def sums(self, figures: Sequence[float]) -> Floats:
        """Sum figures of the layers of each range, (V,)."""
        table = np.concatenate([[0.0], np.cumsum(figures)])
        found: Floats = table[self.stops] - table[self.starts]
        return found

    def total(self, front: float, layers: NDArray[Any], head: float) -> Floats:
        """Sum figures of each range, (V,): of the embeddings, of the layers, (V,), and of what follows the last."""
        has_layers = self.num_layers > 0
        holds_front, holds_head = (self.starts == 0) & has_layers, (self.stops == self.depth) & has_layers
        total: Floats = front * holds_front + layers + head * holds_head
        return total


@dataclass(frozen=True)
class Grid:
    """All stages, with their costs (V, T) on each pool; seconds are infinite if a replica doesn't fit there."""

    vision: LayerRanges
    text: LayerRanges
    costs: tuple[StageCosts, ...]

    def stages(self, index: int, which: Flags) -> Stages:
        """List the stages on pool `index` that a bool (V, T) selects."""
        rows, columns = np.nonzero(which)
        num_text_cuts = self.text.depth + 1
        return Stages(
            **vars(self.costs[index].take((rows, columns))),
            start=self.vision.starts[rows] * num_text_cuts + self.text.starts[columns],
            stop=self.vision.stops[rows] * num_text_cuts + self.text.stops[columns],
            pool=np.full(len(rows), index),
        )


def make_grid(problem: PlacementProblem, vision_cuts: Sequence[int], text_cuts: Sequence[int], min_layers: int) -> Grid:
    """Compute the costs of every stage between the given cuts, as `PlacementProblem.load` does for one stage.

    Cuts are the ascending numbers of a tower's layers before them, including 0 and the depth. Every stage must hold
    `min_layers` (0 or 1) of each tower.
    """
    vision, text = LayerRanges.between(vision_cuts, min_layers), LayerRanges.between(text_cuts, min_layers)
    shape = len(problem.pools), len(vision.starts), len(text.starts)
    seconds, cpu_seconds, memory, smallest = (np.empty(shape) for _ in range(4))
    for rows in row_blocks(*shape[1:]):
        block = vision.part(rows)
        vision_bytes, text_bytes = problem.bytes_at_cuts
        passing = np.add.outer(block.passing(vision_bytes), text.passing(text_bytes))
        weights = np.add.outer(_vision_weights(problem, block), _text_weights(problem, text))
        for index, pool in enumerate(problem.pools):
            costs = pool.costs
            host_s = passing * (costs.send_s_per_byte / 2) + costs.call_s / problem.rows_per_batch
            towers_s = np.add.outer(*_seconds(problem, pool, block, text))
            busy_s = np.maximum(towers_s, host_s / GPU_CALLS) if pool.hides_copies else towers_s + host_s
            workspace = np.maximum.outer(*_workspace(problem, costs, block, text))
            needed = weights + problem.rows_per_batch * (passing + workspace)
            too_large = needed > problem.replica_cap_bytes(pool)
            if problem.weights_cap_bytes is not None:
                too_large |= weights > problem.weights_cap_bytes
            seconds[index, rows] = np.where(too_large, np.inf, busy_s)
            cpu_seconds[index, rows] = busy_s * pool.num_threads if pool.shared else host_s
            memory[index, rows] = needed
            smallest[index, rows] = smallest_part(needed, pool)
    seconds[:, (vision.num_layers == 0)[:, None] & (text.num_layers == 0)] = np.inf
    return Grid(vision, text, tuple(map(StageCosts, seconds, cpu_seconds, memory, smallest)))


def row_blocks(num_rows: int, num_columns: int) -> Iterator[slice]:
    """Cut rows into slices of about `BLOCK_CELLS` cells each."""
    size = max(1, BLOCK_CELLS // max(num_columns, 1))
    return (slice(start, start + size) for start in range(0, num_rows, size))


def _seconds(problem: PlacementProblem, pool: Pool, vision: LayerRanges, text: LayerRanges) -> tuple[Floats, Floats]:
    """Return an item's seconds in each vision range, (V,), and text range, (T,); all in the first for one tower."""
    if problem.config.is_one_tower:
        return vision.sums([problem.towers_s(pool, spec) for spec in _layer_specs(problem)]), np.zeros(1)
    return (
        problem.mix.images_per_item * vision.seconds(pool.costs.vision, problem.shares["vision"]),
        problem.mix.captions_per_item * text.seconds(pool.costs.text, problem.shares["text"]),
    )


def _workspace(
    problem: PlacementProblem, costs: ModelCosts, vision: LayerRanges, text: LayerRanges
) -> tuple[Floats, Floats]:
    """Return an item's workspace in each vision range, (V,), and text range, (T,); all in the first for one tower."""
    of_captions = problem.mix.captions_per_item * costs.workspace_bytes_per_caption
    images = (vision.num_layers > 0).astype(np.float64) * problem.mix.images_per_item * costs.workspace_bytes_per_image
    captions = (text.num_layers > 0).astype(np.float64) * of_captions
    if not problem.config.is_one_tower:
        return images, captions
    runs_texts = vision.sums([float(len(spec.text)) for spec in _layer_specs(problem)]) > 0
    join = np.add if problem.config.preprocess.joins_captions else np.maximum
    held: Floats = join(images, of_captions * runs_texts)
    return held, captions


def _layer_specs(problem: PlacementProblem) -> list[ShardSpec]:
    """Return a stage for each layer of one tower for both sides."""
    return problem.specs([(cut, 0) for cut in range(problem.cut_depths[0] + 1)])


def _vision_weights(problem: PlacementProblem, ranges: LayerRanges) -> Floats:
    if problem.config.is_one_tower:
        config, dtype = problem.config, problem.dtype
        return ranges.sums([float(weight_bytes(config, spec, dtype)) for spec in _layer_specs(problem)])
    sizes = problem.part_bytes
    layer = sizes["vision layers"] / max(ranges.depth, 1)
    return ranges.total(sizes["vision front"], layer * ranges.num_layers, sizes["vision head"])


def _text_weights(problem: PlacementProblem, ranges: LayerRanges) -> Floats:
    """Return the bytes of each text range, (T,); a group of shared weights counts once per range that applies it."""
    text, sizes = problem.config.text, problem.part_bytes
    if text is None or problem.config.is_one_tower:
        return np.zeros(len(ranges.starts))
    numbers = np.array([text.weights_of(layer) for layer in range(ranges.depth)])
    groups = np.cumsum(np.diff(numbers, prepend=numbers[0]) != 0)  # of each layer, numbered without gaps
    group = sizes["text layers"] / (groups[-1] + 1)
    last = np.maximum(ranges.stops - 1, 0)
    first = np.minimum(ranges.starts, ranges.depth - 1)
    num_groups = np.where(ranges.num_layers > 0, groups[last] - groups[first] + 1, 0)
    return ranges.total(sizes["text front"], group * num_groups, sizes["text head"])
