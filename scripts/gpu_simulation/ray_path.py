"""A run's graph on Ray with stages that sleep as long as a GPU computes: what Ray's own path leaves of its rate.

Blocks are as large as on a GPU, and pass through actors with as many calls at once; what leaves a stage has the bytes
of its activations. Nothing is computed and nothing is decoded.
"""

import fcntl
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import ray.data
from ray.data import ActorPoolStrategy

from embedder.compat import worker_options
from embedder.executors.ray_session import ray_session
from embedder.placement.device_settings import GPU_SETTINGS
from embedder.store.tables.arrow_tensors import pack_flat
from shards.config import ModelConfig
from shards.plan import plan_shards

PATIENCE_S = 120.0
NUM_FILLING = 4
"""Blocks that leave the last stage before its rate is measured, and of those that come last."""


class SleepingStage:
    """Actor that has a device for as long as it would compute a block."""

    def __init__(self, row_s: float, bytes_per_row: int, device: str) -> None:
        """Open the lock that stands for the device.

        Args:
            row_s: seconds of the device for a row.
            bytes_per_row: of what leaves.
            device: file that all stages on it lock.
        """
        self._row_s, self._bytes_per_row, self._turn = row_s, bytes_per_row, threading.Lock()
        self._device = Path(device).open("w")  # noqa: SIM115  # as long as the actor lives

    def __call__(self, table: pa.Table) -> pa.Table:
        """Have the device, one call at a time."""
        with self._turn:
            fcntl.flock(self._device, fcntl.LOCK_EX)
            time.sleep(self._row_s * table.num_rows)
            fcntl.flock(self._device, fcntl.LOCK_UN)
        return made_block(table.num_rows, self._bytes_per_row)


def made_block(num_rows: int, bytes_per_row: int) -> pa.Table:
    """Block of so many bytes, whose memory was written."""
    flat = np.ones(num_rows * bytes_per_row, np.uint8)
    return pa.table({"values": pack_flat(flat, np.full(num_rows, bytes_per_row, np.int64))})


def ray_rate(config: ModelConfig, limit_rows_per_s: float, num_stages: int, num_rows: int, num_blocks: int) -> float:
    """Rows a second that leave the last of some stages, each of which has its part of a device's time.

    Args:
        config: the model.
        limit_rows_per_s: of the device.
        num_stages: on the one device.
        num_rows: of a block.
        num_blocks: that are measured.
    """
    stages = plan_shards(config, num_stages, dtype="bfloat16").stages
    flops = [stage.flops_per_image + stage.flops_per_caption for stage in stages]
    first = config.required_vision.input_bytes(0)
    with tempfile.NamedTemporaryFile() as device, ray_session(None, PATIENCE_S, GPU_SETTINGS.object_store_bytes):
        dataset = ray.data.range(num_blocks + 2 * NUM_FILLING, override_num_blocks=num_blocks + 2 * NUM_FILLING)
        dataset = dataset.map_batches(
            lambda _: made_block(num_rows, first), batch_format="pyarrow", batch_size=None, num_cpus=0.5
        )
        for stage, own in zip(stages, flops, strict=True):
            row_s = own / sum(flops) / limit_rows_per_s
            dataset = dataset.map_batches_internal(
                SleepingStage,
                fn_constructor_args=(row_s, stage.cut_bytes_per_image + stage.cut_bytes_per_caption, device.name),
                batch_format="pyarrow",
                batch_size=None,
                compute=ActorPoolStrategy(
                    size=1,
                    max_concurrent_calls_per_actor=GPU_SETTINGS.calls_at_once,
                    enable_true_multi_threading=True,
                ),
                num_cpus=0.1,
                **worker_options(),
            )
        left = [time.perf_counter() for _ in dataset.iter_batches(batch_format="pyarrow", batch_size=None)]
    window_s = left[NUM_FILLING + num_blocks] - left[NUM_FILLING]
    return num_blocks * num_rows / window_s
