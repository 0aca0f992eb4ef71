"""Captions of a block: computed with little padding, counted as the layers see them, and back in their places."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pytest
import torch

from embedder.batch_schema import TRACE, Measurement
from embedder.steps.decode import count_inputs
from embedder.steps.item_decoder import DecodeSpec
from embedder.steps.stage import TowerStage
from embedder.steps.stage_spec import StageSpec
from embedder.store.tables.arrow_tensors import pack, unpack_vectors
from shards.length_groups import CPU_GROUPS
from shards.model_config import load_model_config
from shards.ranges import LayerRange
from shards.shard_specs import ShardSpec, text_only

ROWS_PER_BATCH = 32
MAX_COMPUTED = 1.1  # over tokens present
LENGTHS = {
    "long": np.clip(np.random.default_rng(1).lognormal(2.7, 0.5, 150).round(), 2, 32),
    "skewed": np.clip(np.random.default_rng(0).lognormal(1.9, 0.7, 150).round(), 2, 32),
    "half without captions": np.where(np.arange(64) % 2, np.arange(64) % 29 + 3, 0),
    "equal": np.full(40, 9),
    "one": np.array([5]),
    "one long and one short": np.array([2, 31]),
    "one among rows without": np.array([0, 6, 0]),
    "none": np.zeros(3),
}


@contextmanager
def counted_tokens(stage: TowerStage) -> Iterator[list[int]]:
    """Tokens of each call of the stage's first layer, padding included."""
    counts: list[int] = []
    layer = stage.shard.text.encoder.albert_layer_groups[0]
    hook = layer.register_forward_pre_hook(lambda module, args: counts.append(args[0].shape[0] * args[0].shape[1]))
    yield counts
    hook.remove()


def block_of(lengths: np.ndarray) -> pa.Table:
    """Rows of random captions, null where the length is 0."""
    generator = np.random.default_rng(1)
    captions = [generator.integers(5, 300, int(length)).astype(np.int32) if length else None for length in lengths]
    columns = {"token_ids": pack(captions), "row": pa.array(range(len(lengths)))}
    return pa.table(columns | {"trace": pa.nulls(len(lengths), TRACE)})


def stage_of(model, layers: LayerRange) -> TowerStage:
    """A stage with these layers of the text tower, in batches of fewer rows than most blocks have."""
    spec = ShardSpec(LayerRange(0, 0), layers)
    return TowerStage(StageSpec(0, str(model), spec, "float32", "cpu", 1, (ROWS_PER_BATCH,))).load()


@pytest.fixture(scope="module")
def whole(tiny_model):
    """A stage with the whole text tower, on one thread."""
    before = torch.get_num_threads()
    yield stage_of(tiny_model, text_only(load_model_config(tiny_model)).text)
    torch.set_num_threads(before)


def most_tokens(lengths: np.ndarray) -> float:
    """Most tokens that are computed for a batch: in a small one, a group is worth what it saves."""
    if lengths.sum() > CPU_GROUPS.few_tokens:
        return MAX_COMPUTED * lengths.sum()
    return lengths.sum() + CPU_GROUPS.price_tokens * max(0, len(np.unique(lengths[lengths > 0])) - 1)


@pytest.mark.parametrize("name", LENGTHS)
def test_layers_compute_few_tokens_of_padding_and_as_many_as_are_counted(whole, name):
    lengths = LENGTHS[name]
    table = block_of(lengths)
    with counted_tokens(whole) as counts:
        whole(table)
    computed, depth = sum(counts), whole.config.text.num_layers
    assert computed <= depth * sum(
        map(most_tokens, np.split(lengths, range(ROWS_PER_BATCH, len(lengths), ROWS_PER_BATCH)))
    )
    measurement = Measurement("decode")
    spec = DecodeSpec(None, None, None, 32, 1.0, 1, ROWS_PER_BATCH)
    count_inputs(measurement, table.append_column("pixels", pack([None] * len(lengths))), spec)
    assert measurement.num_tokens * depth == computed
    assert measurement.num_captions == np.count_nonzero(lengths)


@pytest.mark.parametrize("name", LENGTHS)
def test_each_caption_has_in_its_place_the_vector_that_it_has_alone(whole, name):
    lengths = LENGTHS[name]
    table = block_of(lengths)
    encoded = whole(table)
    assert encoded["row"].to_pylist() == list(range(len(lengths)))
    vectors = encoded["text_embedding"].combine_chunks()
    assert [vector is not None for vector in vectors.to_pylist()] == (lengths > 0).tolist()
    rows = np.flatnonzero(lengths)
    alone = [unpack_vectors(whole(table.slice(row, 1))["text_embedding"]) for row in rows]
    if alone:
        np.testing.assert_allclose(unpack_vectors(vectors.drop_null()), np.concatenate(alone), atol=1e-5)


def test_two_stages_give_the_bits_of_one_and_hand_on_tokens_in_the_order_of_rows(tiny_model, whole):
    lengths = LENGTHS["half without captions"].astype(np.int64)
    table = block_of(lengths)
    middle = stage_of(tiny_model, LayerRange(0, 2))(table)
    token_bytes = 4 * whole.config.text.dim
    sizes = [0 if value is None else len(value) for value in middle["text_activation"].to_pylist()]
    assert sizes == (token_bytes * lengths).tolist()
    found = stage_of(tiny_model, LayerRange(2, 4))(middle)["text_embedding"]
    assert found.to_pylist() == whole(table)["text_embedding"].to_pylist()
