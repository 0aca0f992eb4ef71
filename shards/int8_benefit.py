"""Benefit of int8 on a device: the same layers timed in int8 and in the float dtypes, and the weights' bytes.

It must be measured: int8 saves time in the products and loses time in quantising the activations. Wide layers gain,
narrow ones lose; by how much depends on the processor's instructions.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from shards.activations import TowerState
from shards.costs import Dtype, weight_bytes
from shards.model_config import ModelConfig, load_model_config
from shards.profile import clock_of, measure_call, random_activation, torch_threads
from shards.ranges import LayerRange
from shards.shard import Shard, load_shard
from shards.shard_specs import ShardSpec, one_tower, whole_model

COMPARED: tuple[Dtype, ...] = ("float32", "bfloat16", "int8")
TOKENS = 512  # enough to fill the cores: more take as long per token
CAPTION_TOKENS = 16
# Times the fastest: what is slower isn't timed again, as bfloat16 on CPUs without instructions for it.
SLOWER = 5.0
NUM_ROUNDS = 4  # the first warms up; the fastest of the others counts, since other processes only slow one down


@dataclass(frozen=True)
class Int8Benefit:
    """Costs by dtype on a device: `seconds` of all layers for an image with caption, `weight_bytes` of the model."""

    device: str
    seconds: dict[str, float]
    weight_bytes: dict[str, int]

    @property
    def best_float(self) -> str:
        """The fastest float dtype."""
        return min((dtype for dtype in self.seconds if dtype != "int8"), key=self.seconds.__getitem__)

    def refusal(self) -> str | None:
        """Explain with figures why int8 doesn't help; None if it is faster and smaller than all others."""
        is_faster = self.seconds["int8"] < self.seconds[self.best_float]
        is_smaller = self.weight_bytes["int8"] < min(size for name, size in self.weight_bytes.items() if name != "int8")
        if is_faster and is_smaller:
            return None
        figures = (
            f"{name} {1000 * self.seconds[name]:.3g} ms and {self.weight_bytes[name] / 2**20:.1f} MiB"
            for name in self.seconds
        )
        return (
            f"int8 doesn't help this model on {self.device}: for an image with its caption its layers take, and its "
            f"weights hold, {', '.join(figures)}; int8 has to be faster and smaller than each of the others, so use "
            f"{self.best_float}"
        )


def measure_int8_benefit(folder: str | Path, device: str = "cpu", *, num_threads: int = 1) -> Int8Benefit:
    """Time one layer of each tower in each dtype, in turns, with its own weights, the only ones read.

    It takes about a second (ten on a CPU that emulates bfloat16), so the result is not cached: the same machine may be
    slower tomorrow. Raises a ModelError if the folder is no model folder.
    """
    config = load_model_config(folder)
    with torch_threads(num_threads):
        seconds = _time_towers(Path(folder), config, device)
    sizes: dict[str, int] = {dtype: weight_bytes(config, whole_model(config), dtype) for dtype in COMPARED}
    return Int8Benefit(device, seconds, sizes)


def _time_towers(folder: Path, config: ModelConfig, device: str) -> dict[str, float]:
    seconds: dict[str, float] = dict.fromkeys(COMPARED, 0.0)
    for side, tower in config.towers.items():
        middle = tower.num_layers // 2
        spec = one_tower(side, LayerRange(middle, middle + 1))
        for dtype, layer_s in _time_layer(folder, config, spec, side, device).items():
            share = tower.layer_shares[middle] if tower.layer_shares else 1.0
            seconds[dtype] += tower.num_layers * layer_s / share
    return seconds


@torch.inference_mode()
def _time_layer(folder: Path, config: ModelConfig, spec: ShardSpec, side: str, device: str) -> dict[str, float]:
    """Return the seconds of one layer for one input, by dtype."""
    shards = {dtype: load_shard(folder, spec, dtype=dtype, device=device) for dtype in COMPARED}
    seconds: dict[str, list[float]] = {dtype: [] for dtype in COMPARED}
    tower = config.towers[side]
    num_rows = max(1, TOKENS // (tower.inputs_per_row * tower.tokens_in(CAPTION_TOKENS)))
    clock = clock_of(device, torch.get_num_threads())
    least_rounds = 1 if device == "cpu" else 2  # a GPU's first call loads its kernels
    for _ in range(NUM_ROUNDS):
        least_s = min((times[-1] for times in seconds.values() if times), default=math.inf)
        for dtype, shard in shards.items():
            if len(seconds[dtype]) < least_rounds or seconds[dtype][-1] <= SLOWER * least_s:
                seconds[dtype].append(measure_call(_layer_of(shard, side, num_rows), device, clock))
    num_inputs = num_rows * tower.inputs_per_row
    return {dtype: min(times[1:] or times) / num_inputs for dtype, times in seconds.items()}


def _layer_of(shard: Shard, side: str, num_rows: int) -> Callable[[], torch.Tensor]:
    """Return a function that runs the shard's one layer over random activations."""
    tower, layers = shard.config.towers[side], shard.spec.layers_of(side)
    inputs = tower.sample_lengths(1, CAPTION_TOKENS).expand(num_rows)
    grids = tower.sample_grids(inputs)
    # As many elements as leave the layer in front of it.
    elements = tower.arrange(TowerState(inputs, inputs, grids), LayerRange(0, layers.start)).elements_per_row
    rows = TowerState(inputs, elements if layers.start else inputs, grids)
    layout = tower.arrange(rows, layers).move_to(lambda values: values.to(shard.device))
    shape = int(elements.sum()), *tower.activation_shape(layers.start)
    x_FLD = layout.pad(random_activation(shape, shard.dtype, shard.device))
    return lambda: tower.run(getattr(shard, side), layers, x_FLD, layout)
