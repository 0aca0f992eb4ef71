"""All stages that a model allows, as arrays: ranges of one tower combined with ranges of the other. Pure; NumPy.

A stage's seconds, bytes and weights are sums of a part that depends on its vision layers and one that depends on its
text layers, so a grid of all stages is an outer sum.

Legend: `V` ranges of vision layers, `T` ranges of text layers; arrays of stages are (V, T).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shards.config import ModelConfig
from shards.planning.costs import TowerSeconds
from shards.planning.problem import PlacementProblem, Pool
from shards.planning.solver.resources import Floats, Ints, Stages, smallest_part

Flags = NDArray[np.bool_]

BLOCK_CELLS = 10_000  # stages computed together, so that what comes between stays in a core's cache


@dataclass(frozen=True)
class LayerRanges:
    """All ranges of one tower's layers between the cuts that are looked at, ordered by start, then stop.

    Attributes:
        depth: layers of the tower.
        starts: (V,) first layer of each range.
        stops: (V,) layer after the last.
    """

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

    @property
    def is_front(self) -> Flags:
        """Whether a range holds the embeddings, (V,)."""
        front: Flags = (self.starts == 0) & (self.num_layers > 0)
        return front

    @property
    def is_head(self) -> Flags:
        """Whether a range holds the projection, (V,)."""
        head: Flags = (self.stops == self.depth) & (self.num_layers > 0)
        return head

    def seconds(self, costs: TowerSeconds) -> Floats:
        """Seconds of one input, (V,)."""
        return self._sum(costs.front_s, costs.layer_s * self.num_layers, costs.head_s)

    def passing(self, bytes_at: Callable[[int], float]) -> Floats:
        """Bytes that enter and leave each range, (V,)."""
        table: Floats = np.array([bytes_at(layer) for layer in range(self.depth + 1)])
        return table[self.starts] + table[self.stops]

    def weights(self, front: float, layers: NDArray[Any], head: float) -> Floats:
        """Bytes of weights of each range, (V,).

        Args:
            front: bytes of the embeddings.
            layers: (V,), bytes of the layers.
            head: bytes of what follows the last layer.
        """
        return self._sum(front, layers, head)

    def _sum(self, front: float, layers: NDArray[Any], head: float) -> Floats:
        total: Floats = front * self.is_front + layers + head * self.is_head
        return total


@dataclass(frozen=True)
class Grid:
    """All stages, with their costs on each pool.

    Attributes:
        problem: the model, the workload and the devices.
        vision: ranges of the vision tower.
        text: ranges of the text tower.
        seconds: (V, T) for each pool: seconds per item in one replica; infinite where a replica doesn't fit there.
        cpu_seconds: (V, T) for each pool: seconds per item on the host's cores.
        memory: (V, T) for each pool: bytes of one replica.
        smallest: (V, T) for each pool: the smallest part of a device that holds a replica.
    """

    problem: PlacementProblem
    vision: LayerRanges
    text: LayerRanges
    seconds: tuple[Floats, ...]
    cpu_seconds: tuple[Floats, ...]
    memory: tuple[Floats, ...]
    smallest: tuple[Floats, ...]

    def stages(self, index: int, which: Flags) -> Stages:
        """List the stages on pool `index` that a bool (V, T) selects."""
        rows, columns = np.nonzero(which)
        num_text_cuts = self.text.depth + 1
        return Stages(
            self.vision.starts[rows] * num_text_cuts + self.text.starts[columns],
            self.vision.stops[rows] * num_text_cuts + self.text.stops[columns],
            np.full(len(rows), index),
            *(values[index][rows, columns] for values in (self.seconds, self.cpu_seconds, self.memory, self.smallest)),
        )


def make_grid(problem: PlacementProblem, vision_cuts: Sequence[int], text_cuts: Sequence[int], min_layers: int) -> Grid:
    """Compute the costs of every stage between the given cuts, as `PlacementProblem.load` does for one stage.

    Args:
        problem: the model, the workload and the devices.
        vision_cuts: layers of the vision tower that may lie before a cut, ascending, 0 and its depth included.
        text_cuts: the same of the text tower.
        min_layers: layers of each tower that every stage must hold: 0 or 1.
    """
    vision, text = LayerRanges.between(vision_cuts, min_layers), LayerRanges.between(text_cuts, min_layers)
    shape = len(problem.pools), len(vision.starts), len(text.starts)
    seconds, cpu_seconds, memory, smallest = (np.empty(shape) for _ in range(4))
    for rows in row_blocks(*shape[1:]):
        block = vision.part(rows)
        passing = _outer(block.passing(problem.image_bytes), text.passing(problem.caption_bytes))
        weights = _outer(_vision_weights(problem, block), _text_weights(problem, text))
        for index, pool in enumerate(problem.pools):
            host_s = passing * (pool.costs.send_s_per_byte / 2) + pool.costs.call_s / problem.rows_per_batch
            busy_s = _towers_s(problem, pool, block, text) + host_s
            needed = weights + problem.rows_per_batch * (passing + _workspace(problem, pool, block, text))
            seconds[index, rows] = np.where(_too_large(problem, pool, weights, needed), np.inf, busy_s)
            cpu_seconds[index, rows] = busy_s * pool.num_threads if pool.shared else host_s
            memory[index, rows] = needed
            smallest[index, rows] = smallest_part(needed, pool)
    seconds[:, (vision.num_layers == 0)[:, None] & (text.num_layers == 0)] = np.inf
    return Grid(problem, vision, text, *map(tuple, (seconds, cpu_seconds, memory, smallest)))


def row_blocks(num_rows: int, num_columns: int) -> Iterator[slice]:
    """Cut rows into slices of about `BLOCK_CELLS` cells each."""
    size = max(1, BLOCK_CELLS // max(num_columns, 1))
    return (slice(start, start + size) for start in range(0, num_rows, size))


def _towers_s(problem: PlacementProblem, pool: Pool, vision: LayerRanges, text: LayerRanges) -> Floats:
    mix, costs = problem.mix, pool.costs
    return _outer(mix.images_per_item * vision.seconds(costs.vision), mix.captions_per_item * text.seconds(costs.text))


def _workspace(problem: PlacementProblem, pool: Pool, vision: LayerRanges, text: LayerRanges) -> Floats:
    mix, costs = problem.mix, pool.costs
    of_images = mix.images_per_item * costs.workspace_bytes_per_image * (vision.num_layers > 0)
    of_captions = mix.captions_per_item * costs.workspace_bytes_per_caption * (text.num_layers > 0)
    larger: Floats = np.maximum(of_images[:, None], of_captions[None, :])
    return larger


def _too_large(problem: PlacementProblem, pool: Pool, weights: Floats, memory: Floats) -> Flags:
    too_large: Flags = memory > problem.replica_cap_bytes(pool)
    if problem.weights_cap_bytes is not None:
        too_large |= weights > problem.weights_cap_bytes
    return too_large


def _outer(vision: Floats, text: Floats) -> Floats:
    return vision[:, None] + text[None, :]


def _vision_weights(problem: PlacementProblem, ranges: LayerRanges) -> Floats:
    sizes = problem.part_bytes
    layer = sizes["vision layers"] / ranges.depth
    return ranges.weights(sizes["vision front"], layer * ranges.num_layers, sizes["vision head"])


def _text_weights(problem: PlacementProblem, ranges: LayerRanges) -> Floats:
    """Bytes of each text range, (T,); a group of shared weights counts once in each range that applies it."""
    sizes = problem.part_bytes
    groups = _groups_of_layers(problem.config)
    group = sizes["text layers"] / (groups[-1] + 1)
    last = np.maximum(ranges.stops - 1, 0)
    first = np.minimum(ranges.starts, ranges.depth - 1)
    num_groups = np.where(ranges.num_layers > 0, groups[last] - groups[first] + 1, 0)
    return ranges.weights(sizes["text front"], group * num_groups, sizes["text head"])


def _groups_of_layers(config: ModelConfig) -> Ints:
    """Count, for each text layer, the changes of group before it, (layers,)."""
    groups = np.array([config.text.group_of(layer) for layer in range(config.text.num_hidden_layers)])
    return np.cumsum(np.diff(groups, prepend=groups[0]) != 0)
