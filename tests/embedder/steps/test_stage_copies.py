"""Copies of the large tensors: never between Arrow and torch, once from decoded images into a batch."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from embedder.batch_schema import TRACE
from embedder.steps.stage import TowerStage
from embedder.steps.stage_spec import StageSpec
from embedder.store.tables.arrow_tensors import pack, pack_flat
from shards.model_config import load_model_config
from shards.ranges import LayerRange
from shards.shard_specs import ShardSpec

NUM_ROWS = 64
NUM_TOKENS = 7
COPIES = ("aten::clone", "aten::_to_copy", "aten::copy_", "aten::cat")
PADDING_BYTES = 4096  # of Arrow's small buffers: validity, offsets, traces

FRONT, BACK = LayerRange(0, 2), LayerRange(2, 4)


class Copied(TorchDispatchMode):
    """Bytes that torch copies in the block."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Count the call if it copies."""
        result = func(*args, **(kwargs or {}))
        if func._schema.name in COPIES:
            self.num_bytes += result.nbytes
        return result


class Remembering:
    """A shard that computed its answer before, so that what it copies itself does not count."""

    def __init__(self, shard):
        self.shard, self.given, self.made = shard, None, None

    def __getattr__(self, name):
        return getattr(self.shard, name)

    def compute(self, arranged):
        """The answer, computed the first time only."""
        self.given = arranged.batch
        self.made = self.made or self.shard.compute(arranged)
        return self.made


def column_address(column: pa.Array) -> int:
    """Address of the bytes of a tensor column."""
    _, offsets, data = column.buffers()
    return data.address + int(np.frombuffer(offsets, np.int64)[column.offset])


def batch_of(stage: TowerStage) -> pa.Table:
    """Rows as the step before the stage hands them on."""
    vision, text = stage.config.vision, stage.config.text
    shape = (NUM_ROWS, vision.image_size, vision.image_size, 3)
    rows = {"pixels": np.zeros(shape, np.uint8), "token_ids": np.ones((NUM_ROWS, NUM_TOKENS), np.int32)}
    if not stage.spec.shard.vision.holds_front():
        rows = {
            "image_activation": np.zeros((NUM_ROWS, vision.num_tokens, vision.width), np.float32),
            "text_activation": np.zeros((NUM_ROWS, NUM_TOKENS, text.hidden_size), np.float32),
        }
    columns = {name: pack_flat(array, np.full(NUM_ROWS, array[0].nbytes)) for name, array in rows.items()}
    return pa.table(columns | {"trace": pa.nulls(NUM_ROWS, TRACE)})


def make_stage(model, layers: LayerRange) -> TowerStage:
    """A stage with these layers of both towers."""
    config = load_model_config(model)
    assert config.vision.depth == config.text.num_hidden_layers == BACK.stop
    return TowerStage(StageSpec(0, str(model), ShardSpec(layers, layers), "float32", "cpu", 1, (NUM_ROWS,))).load()


@pytest.mark.parametrize("layers", [FRONT, BACK])
def test_a_stage_copies_no_tensor_between_arrow_and_torch(tiny_model, layers):
    stage = make_stage(tiny_model, layers)
    table = batch_of(stage)
    batch = table.to_batches()[0]
    stage.shard = Remembering(stage.shard)
    stage.encode(batch)
    allocated = pa.total_allocated_bytes()
    with Copied() as copied:
        encoded = stage.encode(batch)
    grown = pa.total_allocated_bytes() - allocated
    assert copied.num_bytes == 0
    assert grown < PADDING_BYTES, "Arrow allocates no output: it is torch's memory"
    inputs = stage.shard.given
    assert inputs.vision.values.data_ptr() == column_address(batch.column(0))
    assert inputs.text.values.data_ptr() == column_address(batch.column(1))
    made = stage.shard.made
    outputs = [encoded[name].chunk(0) for name in encoded.schema.names if name != "trace"]
    if layers is FRONT:
        addresses = [column_address(column) for column in outputs]
    else:
        addresses = [column.values.buffers()[1].address for column in outputs]
    assert addresses == [made.vision.values.data_ptr(), made.text.values.data_ptr()]


def test_columns_of_another_tower_pass_through_without_a_copy(tiny_model):
    stage = make_stage(tiny_model, FRONT)
    spec = replace(stage.spec, shard=ShardSpec(FRONT, LayerRange(0, 0)))
    batch = batch_of(stage).to_batches()[0]
    encoded = TowerStage(spec).load().encode(batch)
    assert column_address(encoded["token_ids"].chunk(0)) == column_address(batch["token_ids"])


@pytest.mark.parametrize("num_batches", [1, 3])
def test_a_block_keeps_a_tensor_chunk_a_batch_and_all_else_in_one(tiny_model, num_batches):
    stage = make_stage(tiny_model, FRONT)
    batch = batch_of(stage).append_column("item_id", pa.array([str(row) for row in range(NUM_ROWS)]))
    block = pa.concat_tables([batch] * num_batches)
    encoded = stage(block)
    num_chunks = {name: encoded[name].num_chunks for name in encoded.column_names}
    assert num_chunks == {"image_activation": num_batches, "text_activation": num_batches, "trace": 1, "item_id": 1}
    assert encoded["item_id"].to_pylist() == block["item_id"].to_pylist()
    again = encoded.to_batches(NUM_ROWS)
    assert [batch.num_rows for batch in again] == [NUM_ROWS] * num_batches
    chunks = encoded["image_activation"].chunks
    assert [column_address(batch["image_activation"]) for batch in again] == [column_address(each) for each in chunks]


def test_pixels_are_copied_once_from_the_decoder_into_the_batch():
    images = [np.full((64, 64, 3), number, np.uint8) for number in range(NUM_ROWS)]
    allocated = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        column = pack(images)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert column.nbytes <= peak < 1.1 * column.nbytes, "numpy's one copy"
    assert pa.total_allocated_bytes() == allocated
    assert torch.frombuffer(column.buffers()[2], dtype=torch.uint8).numel() == sum(each.nbytes for each in images)
