"""Benefit of int8 on a device: the same layers timed in int8 and in the float dtypes, and the weights' bytes.

It needs to be measured: int8 saves time in the products and loses time in quantising the activations. Wide layers gain,
narrow ones lose, and by how much depends on the processor's instructions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from shards.activations import Batch, TowerState
from shards.config import ModelConfig, load_model_config
from shards.costs import Dtype, weight_bytes
from shards.ranges import LayerRange, ShardSpec, whole_model
from shards.shard import Shard, load_shard
from shards.timing import clock_of

COMPARED: tuple[Dtype, ...] = ("float32", "bfloat16", "int8")
TOKENS = 512  # enough to fill the cores: more take as long per token
CAPTION_TOKENS = 16
NUM_ROUNDS = 4  # the first warms up; of the others the fastest counts, since other processes only ever slow one down


@dataclass(frozen=True)
class Int8Benefit:
    """Costs of the dtypes on one device.

    Attributes:
        device: device that was measured.
        seconds: by dtype, seconds of all layers of both towers for one image with a caption.
        weight_bytes: by dtype, bytes of the whole model.
    """

    device: str
    seconds: dict[str, float]
    weight_bytes: dict[str, int]

    @property
    def best_float(self) -> str:
        """The fastest of the other dtypes."""
        return min((dtype for dtype in self.seconds if dtype != "int8"), key=self.seconds.__getitem__)

    def refusal(self) -> str | None:
        """Explain why int8 doesn't help, with the figures; None where it is faster and smaller than every other."""
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
    """Time one layer of each tower in each dtype, in turns, with its own weights; only those are read.

    It takes about a second, so the result is not cached: the same machine may be slower tomorrow.

    Args:
        folder: a local model folder.
        device: torch device.
        num_threads: torch threads of a stage.

    Raises:
        ModelError: the folder is no model folder.
    """
    config = load_model_config(folder)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        seconds = _time_towers(Path(folder), config, device)
    finally:
        torch.set_num_threads(threads_before)
    sizes: dict[str, int] = {dtype: weight_bytes(config, whole_model(config), dtype) for dtype in COMPARED}
    return Int8Benefit(device, seconds, sizes)


def _time_towers(folder: Path, config: ModelConfig, device: str) -> dict[str, float]:
    """Seconds of all layers, by dtype."""
    seconds: dict[str, float] = dict.fromkeys(COMPARED, 0.0)
    vision, text = config.vision.depth, config.text.num_hidden_layers
    nothing = LayerRange(0, 0)
    for spec, depth in (
        (ShardSpec(_middle(vision), nothing), vision),
        (ShardSpec(nothing, _middle(text)), text),
    ):
        for dtype, layer_s in _time_layer(folder, config, spec, device).items():
            seconds[dtype] += depth * layer_s
    return seconds


def _middle(depth: int) -> LayerRange:
    """Range of one layer that is neither the first nor the last, where the tower has one."""
    return LayerRange(depth // 2, depth // 2 + 1)


def _time_layer(folder: Path, config: ModelConfig, spec: ShardSpec, device: str) -> dict[str, float]:
    """Seconds of one layer for one input, by dtype."""
    shards = {dtype: load_shard(folder, spec, dtype=dtype, device=device) for dtype in COMPARED}
    seconds: dict[str, list[float]] = {dtype: [] for dtype in COMPARED}
    num_inputs = max(1, TOKENS // (config.vision.num_tokens if len(spec.vision) else CAPTION_TOKENS))
    for _ in range(NUM_ROUNDS):
        for dtype, shard in shards.items():
            batch = _random_batch(config, spec, shard, num_inputs)
            seconds[dtype].append(_timed(lambda shard=shard, batch=batch: shard(batch), device))  # type: ignore[misc]
    return {dtype: min(times[1:]) / num_inputs for dtype, times in seconds.items()}


def _random_batch(config: ModelConfig, spec: ShardSpec, shard: Shard, num_inputs: int) -> Batch:
    """Input of the layer: random activations, or pixels and token ids where it is the first."""
    vision, device = config.vision, shard.device
    if len(spec.vision):
        lengths = torch.ones(num_inputs, dtype=torch.int64)
        side = vision.image_size
        if spec.vision.holds_front():
            return Batch(TowerState(torch.zeros((num_inputs, side, side, 3), dtype=torch.uint8), lengths), None)
        shape = (num_inputs, vision.num_tokens, vision.width)
        return Batch(TowerState(torch.randn(shape, device=device).to(shard.dtype), lengths), None)
    lengths = torch.full((num_inputs,), CAPTION_TOKENS)
    num_tokens = num_inputs * CAPTION_TOKENS
    if spec.text.holds_front():
        return Batch(None, TowerState(torch.zeros(num_tokens, dtype=torch.int32), lengths))
    values = torch.randn((num_tokens, config.text.hidden_size), device=device).to(shard.dtype)
    return Batch(None, TowerState(values, lengths))


def _timed(work: Callable[[], object], device: str) -> float:
    """Wait for the device and return the seconds that the work took."""
    clock = clock_of(device, torch.get_num_threads())
    _wait(device)
    started_s = clock()
    work()
    _wait(device)
    return clock() - started_s


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
