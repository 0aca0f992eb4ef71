"""Stages of a run on a simulated GPU: the stage's own code, with as many calls at once as a run has, block after block.

All stages share the one device, as their processes would. A block that a stage hands on costs the time of its bytes.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any

import pyarrow as pa
import torch

from embedder.engine.device_settings import GPU_SETTINGS, group_costs
from embedder.steps.stage_spec import StageSpec
from gpu_simulation.device import DeviceFigures, SimulatedGpu, fused_attention, on_device
from gpu_simulation.models import shard_of_shapes
from gpu_simulation.stage import SimulatedStage, rows_of, sample_states
from shards.activations import Batch
from shards.config import ModelConfig
from shards.plan import plan_shards
from shards.shard_specs import ShardSpec, whole_model

DTYPE = "bfloat16"
CAUSES = ("input", "copies", "launching")


@dataclass(frozen=True)
class SimulatedRun:
    """What a number of stages reaches.

    Attributes:
        rows_per_s: rows that left the last stage.
        idle: shares of the time in which the device computed nothing, by what it waited for.
        launches_per_row: kernels.
    """

    rows_per_s: float
    idle: dict[str, float]
    launches_per_row: float


def forward_rate(config: ModelConfig, figures: DeviceFigures, num_rows: int, slowness: float, num_calls: int) -> float:
    """Rows a second of the whole model's forward passes, queued one behind the other, their input on the device."""
    gpu, shard = SimulatedGpu(figures, slowness), shard_of_shapes(config, whole_model(config), DTYPE)
    states = sample_states(config, num_rows)
    arranged = shard.arrange(Batch(states["vision"], states["text"]), dict(group_costs(config, [figures.name])))
    arranged = arranged.move_to(lambda values: torch.empty(values.shape, dtype=values.dtype, device="meta"))
    with fused_attention(gpu), on_device(gpu):
        shard.compute(arranged)
        gpu.synchronize()
        started_s = gpu.now_s
        for _ in range(num_calls):
            shard.compute(arranged)
        gpu.synchronize()
        return num_calls * num_rows * slowness / (gpu.now_s - started_s)


def simulate_stages(
    config: ModelConfig,
    folder: Path,
    figures: DeviceFigures,
    num_stages: int,
    *,
    num_rows: int,
    num_blocks: int,
    slowness: float,
    calls_at_once: int | None = None,
) -> SimulatedRun:
    """Send blocks through the stages of a run on one device.

    Args:
        config: the model.
        folder: that has its configuration.
        figures: of the device.
        num_stages: of the run.
        num_rows: of a block, and of a batch.
        num_blocks: beside those that fill the stages.
        slowness: of the simulation.
        calls_at_once: of a stage; None: as a run has it.
    """
    gpu, calls_at_once = SimulatedGpu(figures, slowness), calls_at_once or GPU_SETTINGS.calls_at_once or 1
    costs = group_costs(config, [figures.name])
    specs = [stage.spec for stage in plan_shards(config, num_stages, dtype=DTYPE).stages]
    stages = [_stage(index, spec, folder, costs, num_rows, gpu) for index, spec in enumerate(specs)]
    num_filling = calls_at_once * num_stages
    queues = [Queue[pa.Table | None](calls_at_once) for _ in range(num_stages)]
    done = Queue[pa.Table | None]()
    workers = [
        threading.Thread(target=_work, args=(stage, gpu, own, after), daemon=True)
        for stage, own, after in zip(stages, queues, [*queues[1:], done], strict=True)
        for _ in range(calls_at_once)
    ]
    with fused_attention(gpu):
        for worker in workers:
            worker.start()
        block = rows_of(sample_states(config, num_rows), num_rows)
        feeder = threading.Thread(target=_feed, args=(queues[0], block, num_blocks + 2 * num_filling), daemon=True)
        feeder.start()
        for _ in range(num_filling):
            done.get()
        before = _look(gpu)
        for _ in range(num_blocks):
            done.get()
        after = _look(gpu)
        for _ in range(num_filling):
            done.get()
        for own in queues:
            for _ in range(calls_at_once):
                own.put(None)
    window_s = (after[0] - before[0]) / slowness
    idle = {cause: (after[1][cause] - before[1][cause]) / window_s for cause in CAUSES}
    return SimulatedRun(num_blocks * num_rows / window_s, idle, (after[2] - before[2]) / (num_blocks * num_rows))


def _stage(
    index: int, spec: ShardSpec, folder: Path, costs: Sequence[Any], num_rows: int, gpu: SimulatedGpu
) -> SimulatedStage:
    settings = StageSpec(index, str(folder), spec, DTYPE, "meta", 1, (num_rows,), group_costs=tuple(costs))
    return SimulatedStage(settings, gpu).load()


def _feed(queue: "Queue[pa.Table | None]", block: pa.Table, number: int) -> None:
    for _ in range(number):
        queue.put(block)


def _work(
    stage: SimulatedStage, gpu: SimulatedGpu, own: "Queue[pa.Table | None]", after: "Queue[pa.Table | None]"
) -> None:
    while (block := own.get()) is not None:
        done = stage(block)
        gpu.spend(done.nbytes / gpu.figures.host_bytes_per_s)
        gpu.wait_until(0.0)
        after.put(done)


def _look(gpu: SimulatedGpu) -> tuple[float, dict[str, float], int]:
    return time.perf_counter(), {cause: gpu.idle_s[cause] for cause in CAUSES}, gpu.num_launches
