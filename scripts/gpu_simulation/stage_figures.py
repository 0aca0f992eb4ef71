"""What a shard and a stage of a ViT-L/14 reach on the simulated H100, beside what was measured on a real one.

    cd scripts && python -m gpu_simulation.stage_figures
    git worktree add /tmp/before 65d4dd6
    cd scripts && PYTHONPATH=/tmp/before python -m gpu_simulation.stage_figures      # of that code, which was measured

The measured figures are of commit 65d4dd6. The last line is one JSON document: rows a second by name.
"""

import json
import tempfile
import threading
import time
from pathlib import Path

import torch

from embedder.steps.stage_spec import StageSpec
from gpu_simulation.device import SimulatedGpu, fused_attention, on_device
from gpu_simulation.h100 import H100
from gpu_simulation.models import MODELS, shard_of_shapes, write_config
from gpu_simulation.stage import SimulatedStage, rows_of, sample_states
from harness import number, table
from shards.activations import Batch
from shards.shard_specs import whole_model

SLOWNESS, NUM_BLOCKS = 10.0, 4
MEASURED = {
    "shard, images, 32": 2148,
    "shard, images, 256": 2262,
    "shard, captions, 32": 1009,
    "shard, captions, 256": 4425,
    "shard, both, 32": 748,
    "stage, one call at a time, 32": 632,
    "stage, two calls at once, 32": 352,
    "stage, one call at a time, 256": 1512,
}


def shard_rate(gpu: SimulatedGpu, what: str, num_rows: int) -> float:
    """Rows a second of a shard whose input is on the device."""
    config = MODELS["vit-l-14"]()
    shard, states = shard_of_shapes(config, whole_model(config)), sample_states(config, num_rows, "meta")
    batch = Batch(
        states["vision"] if what != "captions" else None,
        states["text"] if what != "images" else None,
    )
    with on_device(gpu), torch.inference_mode():
        shard(batch)
        gpu.synchronize()
        started_s = gpu.now_s
        shard(batch)
        gpu.synchronize()
        return num_rows * gpu.slowness / (gpu.now_s - started_s)


def stage_rate(gpu: SimulatedGpu, folder: Path, num_calls: int, num_rows: int) -> float:
    """Rows a second of a stage, in blocks of two batches of 32 rows, or of one larger batch."""
    config, block_rows = MODELS["vit-l-14"](), max(64, num_rows)
    spec = StageSpec(0, str(folder), whole_model(config), "bfloat16", "meta", 1, (num_rows,))
    stage = SimulatedStage(spec, gpu).load()
    block = rows_of(sample_states(config, block_rows), block_rows)
    stage(block)

    def work() -> None:
        for _ in range(NUM_BLOCKS):
            stage(block)

    threads = [threading.Thread(target=work) for _ in range(num_calls)]
    started_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return num_calls * NUM_BLOCKS * block.num_rows * gpu.slowness / (time.perf_counter() - started_s)


def main() -> None:
    """Print the table."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = write_config(MODELS["vit-l-14"](), Path(name))
        for figure in MEASURED:
            gpu, (kind, what, size) = SimulatedGpu(H100, SLOWNESS), figure.split(", ")
            with fused_attention(gpu):
                if kind == "shard":
                    found[figure] = shard_rate(gpu, what, int(size))
                else:
                    found[figure] = stage_rate(gpu, folder, 2 if what.startswith("two") else 1, int(size))
    rows = [
        (name, number(rate, 0), number(MEASURED[name], 0), number(rate / MEASURED[name], 2))
        for name, rate in found.items()
    ]
    table([("what", "simulated rows/s", "measured at 65d4dd6", "ratio"), *rows])
    print(json.dumps({name: round(rate, 1) for name, rate in found.items()}))


if __name__ == "__main__":
    main()
