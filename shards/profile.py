"""Measured costs of layers on this machine's device: seconds and workspace bytes for one input; torch, no Ray.

One block of each tower is loaded at a time, so that a model larger than memory can be measured; all blocks of a tower
have the same shape. A single-threaded replica is measured by its own CPU clock, which other processes hardly affect.

Legend: `F` frames, `L` tokens of one image, `R` captions, `T` tokens of one caption, `D` width.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from shards.activations import TowerState
from shards.compat import silent_stderr
from shards.heads import unit_rows
from shards.layouts import Layout
from shards.length_groups import CPU_GROUPS, GroupCosts
from shards.loading import activation_dtype
from shards.model_config import ModelConfig, load_model_config
from shards.planning.planning_costs import ModelCosts, TowerSeconds
from shards.ranges import LayerRange
from shards.shard import Shard, load_shard
from shards.shard_specs import ShardSpec, one_tower
from shards.towers.base import Tower

# Calls and seconds per part (a tower's embeddings, one of its layers, its head), of which the median is used.
MAX_CALLS, MIN_CALLS = 15, 5
PART_S = 0.5
# A batch that takes longer than this is measured with fewer inputs, which use the device as well.
LONG_CALL_S = 0.1
FIRST_LAYER = LayerRange(0, 1)
COPY_BYTES = 16 << 20  # larger than the caches, like activations in the object store

# Runs a part on the first n inputs of a batch.
Step = Callable[[int], torch.Tensor]
Clock = Callable[[], float]


@dataclass(frozen=True)
class TimingSetting:
    """Conditions of a measurement: one batch of `num_rows` inputs in one replica with `num_threads` torch threads.

    `dtype` is that of embeddings and layers; `caption_tokens` is the mean of a caption.
    """

    dtype: str = "float32"
    device: str = "cpu"
    num_threads: int = 1
    num_rows: int = 32
    caption_tokens: int = 16
    group_costs: tuple[tuple[str, GroupCosts], ...] = ()

    @property
    def device_name(self) -> str:
        """Name for `ModelCosts.device`: torch's name of a GPU, or the CPU with its threads."""
        return f"cpu x{self.num_threads}" if self.device == "cpu" else torch.cuda.get_device_name(self.device)


@dataclass(frozen=True)
class TimedPart:
    """Costs of a part for one input."""

    seconds: float
    workspace_bytes: int


def measure_costs(folder: str | Path, setting: TimingSetting, model_fingerprint: str | None = None) -> ModelCosts:
    """Measure each tower's embeddings, layer and head, and a copy; raises a ModelError for a broken model folder."""
    config = load_model_config(folder)
    with torch_threads(setting.num_threads):
        vision, vision_bytes = _measure_tower(folder, config, "vision", setting)
        text, text_bytes = _measure_tower(folder, config, "text", setting)
        copy_s = measure_copy()
    return ModelCosts(
        model_fingerprint=model_fingerprint,
        device=setting.device_name,
        dtype=setting.dtype,
        source="measured",
        caption_tokens=setting.caption_tokens,
        vision=vision,
        text=text,
        send_s_per_byte=copy_s,
        call_s=0.0,
        workspace_bytes_per_image=vision_bytes,
        workspace_bytes_per_caption=text_bytes,
    )


def _measure_tower(
    folder: str | Path, config: ModelConfig, side: str, setting: TimingSetting
) -> tuple[TowerSeconds, int]:
    """Return seconds and workspace bytes; one layer is in memory at a time: embeddings and a layer, then the head."""
    tower = config.towers.get(side)
    if tower is None:
        return TowerSeconds(0.0, 0.0, 0.0), 0
    inputs = tower.inputs_per_row
    setting = replace(setting, num_rows=max(1, setting.num_rows // inputs))
    sample = _SampleBatch(side, tower, setting)
    last = LayerRange(tower.num_layers - 1, tower.num_layers)
    (_, first_count), *kinds = tower.kinds_of_layers
    front, first = _measure_parts(folder, one_tower(side, FIRST_LAYER), setting, sample.run_front, sample.run_layer)
    layers = [(first, first_count)]
    for layer, count in kinds:
        spec = one_tower(side, LayerRange(layer, layer + 1))
        layers += [(part, count) for part in _measure_parts(folder, spec, setting, sample.run_layer)]
    (head,) = _measure_parts(folder, one_tower(side, last), setting, sample.run_head)
    layer_s = sum(part.seconds * count for part, count in layers) / tower.num_layers
    workspace_bytes = max(part.workspace_bytes for part in (front, *(part for part, _ in layers), head))
    return TowerSeconds(front.seconds / inputs, layer_s / inputs, head.seconds / inputs), workspace_bytes // inputs


class _SampleBatch:
    """Batch of a tower's sample inputs, and the parts of the tower to run on its first rows."""

    def __init__(self, side: str, tower: Tower, setting: TimingSetting) -> None:
        lengths = tower.sample_lengths(setting.num_rows, setting.caption_tokens)
        self._side, self._tower = side, tower
        self._batch = TowerState(tower.sample_input(lengths), lengths, tower.sample_grids(lengths))
        self._costs = dict(setting.group_costs).get(side, CPU_GROUPS)
        self._dtype, self._device = activation_dtype(setting.dtype), torch.device(setting.device)
        self._groups: dict[tuple[int, LayerRange], list[tuple[torch.Tensor, Layout, torch.Tensor]]] = {}

    def run_front(self, shard: Shard, num_rows: int) -> torch.Tensor:
        """Run the embeddings."""
        module = getattr(shard, self._side)
        return _join(
            [
                layout.pack(self._tower.front(module, shard.front_input(self._side, values), layout))
                for values, layout, _ in self._groups_of(num_rows, FIRST_LAYER)
            ]
        )

    def run_layer(self, shard: Shard, num_rows: int) -> torch.Tensor:
        """Run the shard's layer."""
        module, layers = getattr(shard, self._side), shard.spec.layers_of(self._side)
        groups = self._groups_of(num_rows, layers)
        return _join([layout.pack(self._tower.run(module, layers, x_FLD, layout)) for _, layout, x_FLD in groups])

    def run_head(self, shard: Shard, num_rows: int) -> torch.Tensor:
        """Run the head."""
        module, project = getattr(shard, self._side), getattr(shard, f"{self._side}_head")
        return _join(
            [
                unit_rows(project(self._tower.pool_tokens(module, x_FLD, layout)), layout.means)
                for _, layout, x_FLD in self._groups_of(num_rows, LayerRange(*[self._tower.num_layers] * 2))
            ]
        )

    def _groups_of(self, num_rows: int, layers: LayerRange) -> list[tuple[torch.Tensor, Layout, torch.Tensor]]:
        """Return input, layout and activation of each group in which the first rows are computed, made only once.

        The layout is for these layers, the activation is in front of them.
        """
        tower = self._tower
        is_alike = tower.activation_shape(layers.start) == tower.activation_shape()
        key = num_rows, FIRST_LAYER if is_alike and len(tower.kinds_of_layers) == 1 else layers
        if key not in self._groups:
            self._groups[key] = self._make_groups(*key)
        return self._groups[key]

    def _make_groups(self, num_rows: int, layers: LayerRange) -> list[tuple[torch.Tensor, Layout, torch.Tensor]]:
        tower, device = self._tower, self._device
        some = self._batch.take(torch.arange(num_rows))
        parts = [some.take(group) for group in some.groups(tower, self._costs)]
        layouts = [tower.arrange(part, layers).move_to(lambda values: values.to(device)) for part in parts]
        before = [tower.arrange(part, LayerRange(0, layers.start)) for part in parts]
        shapes = [(int(each.elements_per_row.sum()), *tower.activation_shape(layers.start)) for each in before]
        return [
            (part.values, layout, layout.pad(random_activation(shape, self._dtype, device)))
            for part, layout, shape in zip(parts, layouts, shapes, strict=True)
        ]


def _join(parts: list[torch.Tensor]) -> torch.Tensor:
    """Join the results of groups, without a copy for a single one."""
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _measure_parts(
    folder: str | Path, spec: ShardSpec, setting: TimingSetting, *runs: Callable[[Shard, int], torch.Tensor]
) -> list[TimedPart]:
    """Time parts of one shard, which is in memory only here."""
    shard = load_shard(folder, spec, dtype=setting.dtype, device=setting.device)
    return [measure_part(partial(run, shard), setting) for run in runs]


def random_activation(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Make random values of the scale that norms produce; some kernels are faster with zeros."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)


def measure_copy() -> float:
    """Measure the seconds per byte of a copy in memory: the minimum of a transfer between processes."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8)
    target = torch.ones(COPY_BYTES, dtype=torch.uint8)
    return median_s(lambda: target.copy_(source), "cpu") / COPY_BYTES


def measure_part(run: Step, setting: TimingSetting) -> TimedPart:
    """Time one part by whole batches, and measure the memory that it allocates besides its output."""
    clock = clock_of(setting.device, setting.num_threads)
    with torch.inference_mode():
        num_rows = _fitting_rows(run, setting)
        workspace_bytes = _workspace_bytes(run, num_rows, setting.device)
        seconds = median_s(partial(run, num_rows), setting.device, clock)
    return TimedPart(seconds / num_rows, workspace_bytes // num_rows)


@contextmanager
def torch_threads(num: int) -> Iterator[None]:
    """Set torch's number of threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def has_own_clock(device: str, num_threads: int) -> bool:
    """Whether a computation runs in one thread, so that the thread's CPU clock measures it."""
    return device == "cpu" and num_threads == 1


def clock_of(device: str, num_threads: int) -> Clock:
    """Choose the clock of a computation: the thread's own, which other processes don't affect, or wall time."""
    return time.thread_time if has_own_clock(device, num_threads) else time.perf_counter


def _fitting_rows(run: Step, setting: TimingSetting) -> int:
    """Return the inputs whose batch takes about `LONG_CALL_S`: whole batches of a large model would take minutes."""
    num_rows = 1
    run(num_rows)  # the very first call loads kernels
    while True:
        seconds = measure_call(partial(run, num_rows), setting.device)
        if num_rows == setting.num_rows or seconds > LONG_CALL_S / 2:
            return num_rows
        num_rows = min(2 * num_rows, setting.num_rows)


def measure_call(call: Callable[[], object], device: str, clock: Clock = time.perf_counter) -> float:
    """Measure the seconds of a call, until the device has finished."""
    _wait(device)
    started_s = clock()
    call()
    _wait(device)
    return clock() - started_s


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def median_s(call: Callable[[], object], device: str, clock: Clock = time.perf_counter) -> float:
    """Measure the median seconds of a call, without the first one."""
    call()
    seconds: list[float] = []
    ends_s = time.perf_counter() + PART_S
    while len(seconds) < MIN_CALLS or (len(seconds) < MAX_CALLS and time.perf_counter() < ends_s):
        seconds.append(measure_call(call, device, clock))
    return statistics.median(seconds)


def _workspace_bytes(run: Step, num_rows: int, device: str) -> int:
    """Measure the peak memory of a call without its output, which counts as the activation that is sent."""
    if device != "cpu":
        _wait(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        output_bytes = run(num_rows).nbytes
        return int(max(torch.cuda.max_memory_allocated(device) - before - output_bytes, 0))
    with silent_stderr(), torch.autograd.profiler.profile(use_kineto=False, profile_memory=True) as profile:
        output_bytes = run(num_rows).nbytes
    events = profile.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    held = peak = 0
    for _, num_bytes in changes:
        held += num_bytes
        peak = max(peak, held)
    return max(peak - output_bytes, 0)
