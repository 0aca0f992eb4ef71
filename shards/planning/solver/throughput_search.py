"""Parametric search for the highest feasible throughput, coarse to fine, and for the preferred of equals.

The package's docstring explains the problem, the bound and why the result is exact.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shards.planning.problem import PlacedStage, PlacementProblem
from shards.planning.solver.bounds import GridAt
from shards.planning.solver.capacities import TIE, Floats, Ints, Resources, Stages, replicas_for
from shards.planning.solver.feasibility import improve_prices, narrow_at, narrow_steps, path_at
from shards.planning.solver.grid import make_grid
from shards.planning.solver.label_setting import Steps, best_within

# Relative resolution of throughputs.
STEP = 1e-9
# The smallest throughput to try, as a fraction of what the devices could do without any loss.
MIN_RATE_SHARE = 1e-9
NEAR = 1.02  # bounds this close are tried one step above the lower, others by halving
# How often prices are changed on a grid before its stages are listed.
COARSE_ROUNDS, FINE_ROUNDS = 20, 0
MAX_GAIN = 1.05  # finer cuts rarely gain more than this at once
FEW_STEPS = 2_000  # above this it pays to drop those that the new lower bound excludes
# Parts of the vision and of the text tower in the first rounds.
COARSE_CUTS = ((8, 6), (16, 12))
NEAR_LAYERS = 3  # cuts this far from the best of those rounds come next
LACK = 1 << 50  # rank of a stage that lacks a tower; more than all bytes that an item could have


@dataclass(frozen=True)
class Placement:
    """Throughput, and the stages in order, each with its pool and its devices there."""

    items_per_s: float
    stages: tuple[PlacedStage, ...]


@dataclass
class _State:
    """State of the search: bounds of the throughput, the best path so far, and prices that worked."""

    low: float
    high: float
    prices: Floats
    path: Stages | None = None


def best_placement(
    problem: PlacementProblem, num_stages: int, *, min_layers: int = 0, min_items_per_s: float = 0.0
) -> Placement | None:
    """Find the placement with the highest throughput; None if nothing fits.

    Ties go to more stages that hold both towers, then to fewer bytes over the cuts, then to more even stages. Each
    stage holds at least one layer, and at least `min_layers` (0 or 1) of each tower; placements below `min_items_per_s`
    are not wanted.
    """
    if sum(problem.part_bytes.values()) > sum(pool.memory_bytes for pool in problem.pools):
        return None  # no cut reduces the weights
    resources = Resources(problem)
    high = min(_fluid_rate(problem), resources.max_rate(num_stages))
    if min_items_per_s > high:
        return None
    state = _State(max(min_items_per_s, high * MIN_RATE_SHARE), high, _first_prices(problem, resources))
    steps = None
    for vision_cuts, text_cuts, num_rounds in _levels(problem, state):
        grid = GridAt(make_grid(problem, vision_cuts, text_cuts, min_layers), resources, state.low, num_stages)
        if state.path is not None and num_rounds:
            state.prices = improve_prices(grid.cheapest, state.prices, num_rounds, stop_when_decided=False).prices
        steps = _climb(grid.open_steps(state.prices), resources, state)
    if state.path is None or steps is None:
        return None
    return _preferable(resources, steps, state.path, state.low, state.prices)


def _levels(problem: PlacementProblem, state: _State) -> Iterator[tuple[Sequence[int], Sequence[int], int]]:
    """Yield the search's levels: cuts of both towers (every few layers, near the best, all), and price rounds."""
    depths = problem.cut_depths
    for parts in COARSE_CUTS:
        widths = [max(1, -(-depth // part)) for depth, part in zip(depths, parts, strict=True)]
        if max(widths) > 1:
            vision, text = ([*range(0, depth, width), depth] for depth, width in zip(depths, widths, strict=True))
            yield vision, text, COARSE_ROUNDS
    if state.path is not None:
        tower_cuts = np.divmod(state.path.start, depths[1] + 1)
        vision, text = (_near(cuts, depth) for cuts, depth in zip(tower_cuts, depths, strict=True))
        yield vision, text, COARSE_ROUNDS
    yield range(depths[0] + 1), range(depths[1] + 1), FINE_ROUNDS


def _near(cuts: Ints, depth: int) -> list[int]:
    """Return the cuts, those near them, and both ends."""
    near = cuts[:, None] + np.arange(-NEAR_LAYERS, NEAR_LAYERS + 1)
    return [int(cut) for cut in np.union1d(near[(near >= 0) & (near <= depth)], [0, depth])]


def _fluid_rate(problem: PlacementProblem) -> float:
    """Return an upper bound: all devices always busy, each layer where it is fastest, no transfers."""
    mix, (vision_depth, text_depth) = problem.mix, problem.depths
    vision_s = min(pool.costs.vision.layer_s for pool in problem.pools) * vision_depth
    text_s = min(pool.costs.text.layer_s for pool in problem.pools) * text_depth
    num = sum(pool.num for pool in problem.pools if pool.has_own_cores or not pool.shared)
    if not any(pool.has_own_cores for pool in problem.pools):
        num += problem.num_cores or 0
    seconds = mix.images_per_item * vision_s + mix.captions_per_item * text_s
    return num / seconds


def _first_prices(problem: PlacementProblem, resources: Resources) -> Floats:
    """Return prices by each pool's share of the total speed; others start low, and rise where they run short."""
    mix, depths = problem.mix, problem.depths
    prices = np.full(resources.num, 0.01)
    for index, pool in enumerate(problem.pools):
        vision_s, text_s = pool.costs.vision.layer_s * depths[0], pool.costs.text.layer_s * depths[1]
        seconds = mix.images_per_item * vision_s + mix.captions_per_item * text_s
        speed = pool.num / (seconds * (pool.num_threads if pool.shared else 1))
        prices[index if pool.has_own_cores or not pool.shared else resources.cores] = speed
    used = [index for index, pool in enumerate(problem.pools) if pool.has_own_cores or not pool.shared]
    total = prices[[*used, resources.cores]].sum()
    prices /= total
    prices[list(resources.memory.values()) or -1] = 0.01
    floored = np.maximum(prices, 1e-6)  # never 0: an infinite use must stay infinite
    shares: Floats = floored / floored.sum()
    return shares


def _climb(steps: Steps, resources: Resources, state: _State) -> Steps:
    """Raise the feasible rate `low` until no path is faster; returns the steps that stay open."""
    prices = state.prices
    max_gain = MAX_GAIN if state.path is not None else np.inf
    if state.path is None and not _try(steps, resources, state, state.low, prices):
        return steps
    high, halve = state.high, True
    while high > state.low * (1 + STEP):
        # Far from the end halving is fast; near it, one probe just above `low` may end the search.
        halve = not halve or high > state.low * NEAR
        rate = min((state.low + high) / 2, state.low * max_gain) if halve else state.low * (1 + STEP)
        if not _try(steps, resources, state, rate, prices):
            high = rate
        elif len(steps.stages) > FEW_STEPS:
            steps, prices = narrow_at(steps, resources, state.low, prices)
    return steps


def _try(steps: Steps, resources: Resources, state: _State, rate: float, prices: Floats) -> bool:
    """Whether a rate is feasible; if so, the state takes the path found."""
    path = path_at(steps, resources, rate, prices)
    if path is None:
        return False
    state.path = steps.stages.take(path)
    state.low = resources.best_rate(state.path, rate, state.high * 2)
    return True


def _preferable(resources: Resources, steps: Steps, best: Stages, rate: float, prices: Floats) -> Placement:
    """Choose among the paths that are as fast as the best one, all of which `steps` contains.

    `rate` is the best path's throughput; `prices` (R,) exclude steps that can't fit.
    """
    rate *= 1 - TIE
    uses = resources.parts(steps.stages, rate)
    left, numbers = narrow_steps(steps, uses, prices)
    rank, unevenness = _rank(resources.problem, left.stages), _unevenness(resources, left.stages, rate)
    path = left.find_preferred(rank, unevenness)
    if path is None or not np.all(uses[:, numbers[path]].sum(axis=1) <= 1 + TIE):
        path = best_within(left, uses[:, numbers], prices, rank, unevenness)
    return _placement(resources, best if path is None else left.stages.take(path), rate)


def _rank(problem: PlacementProblem, stages: Stages) -> Ints:
    """Return the rank of each stage, (E,): whether it lacks a tower, then the bytes that it sends to the next."""
    vision_depth, text_depth = problem.cut_depths
    vision_start, text_start = np.divmod(stages.start, text_depth + 1)
    vision_stop, text_stop = np.divmod(stages.stop, text_depth + 1)
    lacks = (vision_start == vision_stop) | (text_start == text_stop) & (text_depth > 0)
    image_bytes, caption_bytes = map(np.array, problem.bytes_at_cuts)
    sent = np.rint(image_bytes[vision_stop] + caption_bytes[text_stop]).astype(np.int64)
    at_end = (vision_stop == vision_depth) & (text_stop == text_depth)
    rank: Ints = LACK * lacks.astype(np.int64) + np.where(at_end, 0, sent)
    return rank


def _unevenness(resources: Resources, stages: Stages, rate: float) -> Floats:
    """Return the squares of the seconds that an item takes in a stage with all its devices, (E,)."""
    devices = np.where(_is_shared(resources, stages), 1.0, _devices(resources, stages, rate))
    squares: Floats = (stages.seconds / devices) ** 2
    return squares


def _devices(resources: Resources, stages: Stages, rate: float) -> Floats:
    """Return the devices that each stage takes, (E,); on shared cores, its replicas."""
    taken = resources.of(stages, rate)[stages.pool, np.arange(len(stages))]
    replicas = np.maximum(1.0, replicas_for(rate * stages.seconds))
    return np.where(_is_shared(resources, stages), replicas, taken)


def _is_shared(resources: Resources, stages: Stages) -> NDArray[np.bool_]:
    return np.array([pool.shared for pool in resources.problem.pools])[stages.pool]


def _placement(resources: Resources, stages: Stages, rate: float) -> Placement:
    problem = resources.problem
    cuts = [divmod(int(cut), problem.cut_depths[1] + 1) for cut in (*stages.start, stages.stop[-1])]
    placed = zip(problem.specs(cuts), stages.pool, _devices(resources, stages, rate), strict=True)
    return Placement(
        items_per_s=resources.best_rate(stages, rate, 2 * rate),
        stages=tuple(PlacedStage(spec, problem.pools[pool], float(devices)) for spec, pool, devices in placed),
    )
