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
from typing import Any

import pyarrow as pa
import torch

from embedder.batch_schema import TRACE
from embedder.steps.stage import Stage
from embedder.steps.stage_actor import StageSpec
from embedder.store.arrow_tensors import pack_flat
from gpu_simulation.device import SimulatedCopies, SimulatedGpu, fused_attention, on_device
from gpu_simulation.h100 import H100
from gpu_simulation.models import MODELS, shard_of_shapes, write_config
from harness import number, table
from shards.activations import Batch, TowerState
from shards.ranges import whole_model

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


class SimulatedStage(Stage):
    """Stage on a simulated device, of whichever commit `embedder` is."""

    def __init__(self, spec: StageSpec, gpu: SimulatedGpu) -> None:
        self._gpu = gpu
        super().__init__(spec)
        self._copies = SimulatedCopies(gpu)

    def _load(self, folder: Path) -> Any:
        return shard_of_shapes(self.config, self.spec.shard)

    def encode(self, batch: pa.RecordBatch) -> pa.Table:
        """Run a batch."""
        self._gpu.spend(self._gpu.figures.call_s)
        return super().encode(batch)

    def __call__(self, table: pa.Table) -> pa.Table:
        """Run a block."""
        with on_device(self._gpu), self._gpu.call():
            return super().__call__(table)


def caption_lengths(num_rows: int) -> torch.Tensor:
    """Lengths of captions as those of the measured ones."""
    return torch.randint(9, 22, (num_rows,), generator=torch.Generator().manual_seed(1))


def shard_rate(gpu: SimulatedGpu, what: str, num_rows: int) -> float:
    """Rows a second of a shard whose input is on the device."""
    config = MODELS["vit-l-14"]()
    shard, lengths = shard_of_shapes(config, whole_model(config)), caption_lengths(num_rows)
    pixels = torch.empty((num_rows, 224, 224, 3), dtype=torch.uint8, device="meta")
    ids = torch.empty(int(lengths.sum()), dtype=torch.int32, device="meta")
    images = TowerState(pixels, torch.ones(num_rows, dtype=torch.int64)) if what != "captions" else None
    batch = Batch(images, TowerState(ids, lengths) if what != "images" else None)
    with on_device(gpu), torch.inference_mode():
        shard(batch)
        gpu.synchronize()
        started_s = gpu.now_s
        shard(batch)
        gpu.synchronize()
        return num_rows * gpu.slowness / (gpu.now_s - started_s)


def stage_rate(gpu: SimulatedGpu, folder: Path, num_calls: int, num_rows: int) -> float:
    """Rows a second of a stage, in blocks of two batches of 32 rows, or of one larger batch."""
    spec = whole_model(MODELS["vit-l-14"]())
    stage = SimulatedStage(StageSpec(0, str(folder), spec, "bfloat16", "meta", 1, (num_rows,)), gpu)
    block = decoded_rows(max(64, num_rows))
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


def decoded_rows(num_rows: int) -> pa.Table:
    """Rows as decoding hands them on; all of them are zeros or ones."""
    pixels, lengths = torch.zeros((num_rows, 224, 224, 3), dtype=torch.uint8), caption_lengths(num_rows)
    ids = torch.ones(int(lengths.sum()), dtype=torch.int32)
    sizes = torch.full((num_rows,), pixels[0].nbytes)
    columns = {
        "pixels": pack_flat(pixels.numpy(), sizes.numpy()),
        "token_ids": pack_flat(ids.numpy(), (4 * lengths).numpy()),
    }
    return pa.table({"item_id": [str(row) for row in range(num_rows)]} | columns | {"trace": pa.nulls(num_rows, TRACE)})


def main() -> None:
    """Print the table."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = write_config(MODELS["vit-l-14"](), Path(name))
        for figure in MEASURED:
            gpu, (kind, what, size) = SimulatedGpu(H100, SLOWNESS), figure.split(", ")
            with fused_attention(gpu):
                is_shard = kind == "shard"
                found[figure] = (
                    shard_rate(gpu, what, int(size))
                    if is_shard
                    else stage_rate(gpu, folder, 2 if what.startswith("two") else 1, int(size))
                )
    rows = [
        (name, number(rate, 0), number(MEASURED[name], 0), number(rate / MEASURED[name], 2))
        for name, rate in found.items()
    ]
    table([("what", "simulated rows/s", "measured at 65d4dd6", "ratio"), *rows])
    print(json.dumps({name: round(rate, 1) for name, rate in found.items()}))


if __name__ == "__main__":
    main()
