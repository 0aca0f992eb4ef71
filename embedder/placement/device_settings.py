"""Sizes of batches and blocks, and concurrent calls, by kind of device: all that caches, launches and links decide.

The reasons for the values are in `docs/decisions.md`.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil, log2
from typing import Literal

from embedder.placement.resources import OBJECT_STORE_BYTES
from shards.costs import cut_bytes
from shards.length_groups import GroupCosts, gpu_groups
from shards.model_config import ModelConfig
from shards.model_errors import ModelError
from shards.planning.devices import (
    CPU_ROWS,
    DEVICES,
    GPU_CALLS,
    GPU_ROWS,
    RAY_NAMES,
    DeviceType,
    Fleet,
    device_of_ray_type,
)
from shards.planning.planning_costs import ModelCosts

CAPTION_TOKENS = 16
STORE_SHARE = 0.5
"""Of Ray's object store, what Ray Data fills before it holds back steps; each step has an equal part of it."""
FEW_ITEMS = 64
"""Most items of a block whose files are large, and of a run's first `FIRST_ITEMS`."""
FIRST_ITEMS = 512
"""In small blocks, so that the last stage starts, and a part is written, soon."""
UNKNOWN_FILE_BYTES = 256 << 10
"""Assumed for a picture of unknown size; a clip of unknown size is taken for a large file."""
BYTES_PER_CAPTION_BYTE = 256
"""Weight of a byte of a caption without a file, in bytes of a file: activations grow with a caption's length."""
BLOCKS_PER_REPLICA = 4
"""Blocks of a step that a replica needs room for: one computes, one comes, one leaves, one waits."""
USUAL_GPU = "A100"
"""Assumed for GPUs that the table does not have."""


@dataclass(frozen=True)
class DeviceSettings:
    """Sizes for one kind of device.

    With `batch_size` "auto" a stage computes the first of `batch_sizes` together, or others by trial; sizes are halved
    until a batch at the model's widest hand-over has at most `max_batch_bytes`. A block has at
    most `block_bytes` at its widest hand-over, or `max_block_bytes` if the fastest stage's call would be shorter than
    `min_call_s`, when Ray and the driver cost a good part of it. With fewer than `min_blocks`, cores and stages would
    idle at a run's start and end; with more than `max_file_bytes` of files, as of videos, a few blocks keep a task busy
    for minutes. Shared memory, at most `object_store_bytes`, is to hold `batches_in_flight`, on a GPU also what many
    cores decode while a stage loads. `calls_at_once` of None means Ray's default.
    """

    batch_sizes: tuple[int, ...]
    max_batch_bytes: int | None
    block_bytes: int
    max_block_bytes: int
    min_call_s: float
    max_items: int
    min_blocks: int
    max_file_bytes: int
    object_store_bytes: int
    batches_in_flight: int
    calls_at_once: int | None


CPU_SETTINGS = DeviceSettings(
    batch_sizes=(CPU_ROWS, 16, 8),
    max_batch_bytes=None,
    block_bytes=12 << 20,
    max_block_bytes=24 << 20,
    min_call_s=0.05,
    max_items=512,
    min_blocks=16,
    max_file_bytes=16 << 20,
    object_store_bytes=OBJECT_STORE_BYTES,
    batches_in_flight=64,
    calls_at_once=None,
)
GPU_SETTINGS = DeviceSettings(
    batch_sizes=(GPU_ROWS, 512, 1024, 128, 64),
    max_batch_bytes=512 << 20,
    block_bytes=160 << 20,
    max_block_bytes=160 << 20,
    min_call_s=0.05,
    max_items=1024,
    min_blocks=64,
    max_file_bytes=64 << 20,
    object_store_bytes=16 << 30,
    batches_in_flight=256,
    calls_at_once=GPU_CALLS,
)


def settings_of(devices: Iterable[str], config: ModelConfig) -> DeviceSettings:
    """Choose the sizes of a run by the torch devices of its stages: a GPU's if any of them is on one."""
    settings = GPU_SETTINGS if "cuda" in devices else CPU_SETTINGS
    if settings.max_batch_bytes is None:
        return settings
    return _with_batches_of(settings, settings.max_batch_bytes // widest_bytes(config, is_cut=True))


def _with_batches_of(settings: DeviceSettings, most_rows: int) -> DeviceSettings:
    """Halve all batch sizes until the first has at most so many rows, or one."""
    times = max(1, 2 ** ceil(log2(settings.batch_sizes[0] / max(1, most_rows))))
    return replace(settings, batch_sizes=tuple(max(1, size // times) for size in settings.batch_sizes))


def fit_to_store(
    settings: DeviceSettings, bytes_per_row: int, store_bytes: int, num_steps: int, num_replicas: int
) -> DeviceSettings:
    """Lower a GPU's blocks, and batches with them, until each of `num_steps` steps has room for several.

    Larger ones pass the steps one by one, each waiting for the others. `bytes_per_row` is that of the widest hand-over,
    `store_bytes` Ray's object store on all nodes, 0 if unknown, and `num_replicas` those of the step with the most.
    """
    if not store_bytes or settings.max_batch_bytes is None:
        return settings
    fitting = int(store_bytes * STORE_SHARE) // (num_steps * num_replicas * BLOCKS_PER_REPLICA)
    if fitting >= max(settings.max_block_bytes, settings.batch_sizes[0] * bytes_per_row):  # a block holds whole batches
        return settings
    block_bytes, max_block_bytes = min(settings.block_bytes, fitting), min(settings.max_block_bytes, fitting)
    fitted = replace(settings, block_bytes=block_bytes, max_block_bytes=max_block_bytes)
    return _with_batches_of(fitted, fitting // bytes_per_row)


def widest_bytes(config: ModelConfig, *, is_cut: bool) -> int:
    """Return the most bytes that one row, of an image, a clip or a caption, takes in half precision.

    At any cut, or where the model is whole, before it and behind it.
    """
    return max(
        tower.inputs_per_row * cut_bytes(config, side, layer, "bfloat16", CAPTION_TOKENS)
        for side, tower in config.towers.items()
        for layer in (range(tower.num_layers + 1) if is_cut else (0, tower.num_layers))
    )


def settings_of_fleet(fleet: Fleet, config: ModelConfig) -> DeviceSettings:
    """Choose the sizes of a run on planned devices."""
    return settings_of(("cuda" for _, device in fleet if device.kind == "gpu"), config)


def settings_of_costs(costs: ModelCosts, config: ModelConfig) -> DeviceSettings:
    """Choose the sizes of a run on the device that the costs are for."""
    return settings_of([] if costs.device.lower().startswith("cpu") else ["cuda"], config)


def batch_sizes(batch_size: int | Literal["auto"], settings: DeviceSettings = CPU_SETTINGS) -> tuple[int, ...]:
    """Return the batch sizes that a stage may try."""
    return settings.batch_sizes if batch_size == "auto" else (batch_size,)


def rows_per_batch(batch_size: int | Literal["auto"], settings: DeviceSettings = CPU_SETTINGS) -> int:
    """Return the rows that a stage computes together, as far as a plan counts them."""
    return batch_sizes(batch_size, settings)[0]


def group_costs(config: ModelConfig, gpus: Iterable[str], dtype: str = "float16") -> tuple[tuple[str, GroupCosts], ...]:
    """Return the costs by which rows of similar length are grouped on GPUs, by side; equal in all stages."""
    flops = min(each.get(dtype, each["float32"]) for each in (gpu_type(name).flops for name in [*gpus] or [USUAL_GPU]))
    per_token = {
        side: tower.flops(CAPTION_TOKENS).layer / tower.tokens_in(CAPTION_TOKENS)
        for side, tower in config.towers.items()
    }
    return tuple(
        (side, gpu_groups(per_token[side], tower.kernels_per_layer, flops)) for side, tower in config.towers.items()
    )


def gpu_type(name: str) -> DeviceType:
    """Find a GPU in the planner's table by Ray's name, a plan's ("H100:80GB") or its driver's ("NVIDIA H100 80GB")."""
    words = set(re.split("[-: ]", name))
    for known, device in DEVICES.items():
        if device.kind == "gpu" and (known in words or name == known):
            return device
    try:
        return device_of_ray_type(next(iter(words & RAY_NAMES.keys()), name))
    except ModelError:
        return DEVICES[USUAL_GPU]
