"""All stages that a model allows, as arrays: ranges of one tower combined with ranges of the other.

A stage's seconds, bytes and weights are sums of a part that depends on its vision layers and one that depends on its
text layers, so a grid of all stages is an outer sum.

Legend: `V` ranges of vision layers, `T` ranges of text layers; arrays of stages are (V, T).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shards.planning.planning_costs import TowerSeconds
from shards.planning.problem import PlacementProblem
from shards.planning.solver.capacities import Floats, Ints, StageCosts, Stages, smallest_part

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

    def passing(self, bytes_at: Callable[[int], float]) -> Floats:
        """Return the bytes that enter and leave each range, (V,)."""
        table: Floats = np.array([bytes_at(layer) for layer in range(self.depth + 1)])
        return table[self.starts] + table[self.stops]

    def seconds(self, costs: TowerSeconds) -> Floats:
        """Return the seconds of one input, (V,)."""
        return self.total(costs.front_s, costs.layer_s * self.num_layers, costs.head_s)

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
    images, captions = problem.mix.images_per_item, problem.mix.captions_per_item
    shape = len(problem.pools), len(vision.starts), len(text.starts)
    seconds, cpu_seconds, memory, smallest = (np.empty(shape) for _ in range(4))
    for rows in row_blocks(*shape[1:]):
        block = vision.part(rows)
        passing = np.add.outer(block.passing(problem.image_bytes), text.passing(problem.caption_bytes))
        weights = np.add.outer(_vision_weights(problem, block), _text_weights(problem, text))
        for index, pool in enumerate(problem.pools):
            costs = pool.costs
            host_s = passing * (costs.send_s_per_byte / 2) + costs.call_s / problem.rows_per_batch
            towers_s = np.add.outer(images * block.seconds(costs.vision), captions * text.seconds(costs.text))
            busy_s = np.maximum(towers_s, host_s) if pool.hides_copies else towers_s + host_s
            workspace = np.maximum.outer(
                images * costs.workspace_bytes_per_image * (block.num_layers > 0),
                captions * costs.workspace_bytes_per_caption * (text.num_layers > 0),
            )
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


def _vision_weights(problem: PlacementProblem, ranges: LayerRanges) -> Floats:
    sizes = problem.part_bytes
    layer = sizes["vision layers"] / max(ranges.depth, 1)
    return ranges.total(sizes["vision front"], layer * ranges.num_layers, sizes["vision head"])


def _text_weights(problem: PlacementProblem, ranges: LayerRanges) -> Floats:
    """Return the bytes of each text range, (T,); a group of shared weights counts once per range that applies it."""
    text, sizes = problem.config.text, problem.part_bytes
    if text is None:
        return np.zeros(len(ranges.starts))
    numbers = np.array([text.weights_of(layer) for layer in range(ranges.depth)])
    groups = np.cumsum(np.diff(numbers, prepend=numbers[0]) != 0)  # of each layer, numbered without gaps
    group = sizes["text layers"] / (groups[-1] + 1)
    last = np.maximum(ranges.stops - 1, 0)
    first = np.minimum(ranges.starts, ranges.depth - 1)
    num_groups = np.where(ranges.num_layers > 0, groups[last] - groups[first] + 1, 0)
    return ranges.total(sizes["text front"], group * num_groups, sizes["text head"])
