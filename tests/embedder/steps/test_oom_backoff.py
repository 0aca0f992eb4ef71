"""A stage that runs out of memory halves its batch and continues, with the same vectors."""

import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
import torch

from embedder.batch_schema import DECODED
from embedder.errors import RunFailedError
from embedder.steps.oom_backoff import OomBackoffEncoder
from embedder.steps.stage import TowerStage
from embedder.steps.stage_spec import StageSpec
from embedder.store.tables.arrow_tensors import pack, unpack_vectors
from shards.model_config import load_model_config
from shards.shard_specs import whole_model

CUDA_ERROR = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
CPU_ERROR = RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried")


def batch_of(num_rows):
    return pa.record_batch({"row": pa.array(range(num_rows), pa.int64())})


def encoder_that_fits(num_rows, error=CUDA_ERROR, seen=None):
    """Encodes at most so many rows at once."""

    def encode(batch):
        if seen is not None:
            seen.append(batch.num_rows)
        if batch.num_rows > num_rows:
            raise error
        return pa.table(batch)

    return OomBackoffEncoder("stage 1", encode)


OTHER_CUDA_ERRORS = (
    torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in the documentation"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
)


@pytest.mark.parametrize("error", [CUDA_ERROR, CPU_ERROR, MemoryError(), *OTHER_CUDA_ERRORS])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 31, 32])
def test_all_rows_come_through_in_order_whatever_fits(error, num_rows):
    tables = encoder_that_fits(num_rows, error)(batch_of(32))
    assert pa.concat_tables(tables)["row"].to_pylist() == list(range(32))


def test_what_did_not_fit_once_is_not_tried_again():
    seen = []
    encode = encoder_that_fits(5, seen=seen)
    for _ in range(3):
        list(encode(batch_of(16)))
    assert seen == [16, 8, 4, 4, 4, 4] + [4] * 8


def test_of_calls_at_once_the_one_that_found_the_least_room_decides():
    encode = encoder_that_fits(5)
    for num_rows in (1024, 512, 1024):
        encode._shrink(num_rows)
    assert encode.max_rows == 256


def test_one_row_that_does_not_fit_ends_the_run_with_the_cure():
    with pytest.raises(
        RunFailedError, match=r"stage 1: one item alone needs more memory .*num_stages.*CUDA out of memory"
    ):
        list(encoder_that_fits(0)(batch_of(4)))


def test_other_errors_are_not_taken_for_a_lack_of_memory():
    with pytest.raises(RuntimeError, match="shapes"):
        list(encoder_that_fits(1, RuntimeError("mat1 and mat2 shapes cannot be multiplied"))(batch_of(4)))


def stage_of(model, rows_per_batch=64):
    spec = whole_model(load_model_config(model))
    return TowerStage(StageSpec(0, str(model), spec, "float32", "cpu", 1, (rows_per_batch,))).load()


def decoded_rows(num_rows, size=32, num_frames=1):
    """Rows as the decode step makes them."""
    rng = np.random.default_rng(0)
    pixels = [rng.integers(0, 255, (num_frames, size, size, 3), np.uint8) for _ in range(num_rows)]
    tokens = [np.arange(2, 4 + number % 9, dtype=np.int32) for number in range(num_rows)]
    columns = {"pixels": pack(pixels), "token_ids": pack(tokens)}
    columns["trace"] = pa.nulls(num_rows, DECODED.field("trace").type)
    return pa.table(columns)


def rows_per_call(table):
    """Rows of each batch that the stage computed."""
    steps = [step for steps in table["trace"].drop_null().to_pylist() for step in steps]
    return [step["num_rows"] for step in steps if step["step"] == "stage 0"]


def test_a_stage_gives_the_same_vectors_in_pieces(tiny_model):
    rows = decoded_rows(50)
    whole = stage_of(tiny_model)(rows)
    stage = stage_of(tiny_model)

    compute = stage.shard.compute

    def short_of_memory(arranged):
        if len(arranged.batch.vision.lengths) > 6:
            raise CPU_ERROR
        return compute(arranged)

    stage.shard.compute = short_of_memory
    pieces = stage(rows)
    assert pieces.num_rows == 50
    for name in ("image_embedding", "text_embedding"):
        assert np.allclose(unpack_vectors(whole[name]), unpack_vectors(pieces[name]), atol=1e-6)
    assert rows_per_call(pieces) == [4] * 12 + [2], "the measurements are of the pieces"


LIMITED = """
import json, resource, sys
sys.path[:0] = json.loads(sys.argv[3])
import numpy as np, psutil, torch
from test_oom_backoff import decoded_rows, rows_per_call, stage_of
from embedder.store.tables.arrow_tensors import unpack_vectors

torch.set_num_threads(1)
rows = decoded_rows(256, num_frames=8)
stage = stage_of(sys.argv[1], rows_per_batch=256)
stage(rows.slice(0, 2))
expected = unpack_vectors(stage_of(sys.argv[1], rows_per_batch=4)(rows)["image_embedding"])
room = psutil.Process().memory_info().vms + int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_AS, (room, room))
table = stage(rows)
found = unpack_vectors(table["image_embedding"])
print(json.dumps({"rows": rows_per_call(table), "same": bool(np.allclose(found, expected, atol=1e-5))}))
"""


@pytest.mark.slow
def test_a_real_lack_of_memory_is_survived(tiny_model):
    """The address space ends a few MiB above what a small batch needs."""
    command = [sys.executable, "-c", LIMITED, str(tiny_model), str(12 << 20), json.dumps(sys.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["same"]
    assert sum(found["rows"]) == 256
    assert max(found["rows"]) < 256, "it did run out of memory"


@pytest.mark.gpu
def test_a_device_out_of_memory_is_survived(tiny_model):
    spec = whole_model(load_model_config(tiny_model))
    stage = TowerStage(StageSpec(0, str(tiny_model), spec, "float32", "cuda", 1, (4096,))).load()
    rows = decoded_rows(4096, num_frames=2)
    expected = unpack_vectors(stage(rows)["image_embedding"])
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (64 << 20)) / total)
    try:
        table = stage(rows)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert max(rows_per_call(table)) < 4096
    assert np.allclose(unpack_vectors(table["image_embedding"]), expected, atol=1e-4)
