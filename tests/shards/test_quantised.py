"""int8 stages: their tensors, their distance from float32, and that neither cut nor batch changes them."""

import itertools
import subprocess
import sys

import pytest
import torch

from shards.costs import cut_bytes, weight_bytes
from shards.fresh import init_model
from shards.plan import LayerRange, ShardSpec, plan_shards
from shards.quantised import BLOCK_ROWS, Int8Linear, quantise_rows, quantise_weight
from shards.reference import load_towers
from shards.shard import load_shard
from shards.shard_specs import whole_model
from shards.tensor_shapes import shard_shapes


def run(shards, batch):
    for shard in shards:
        batch = shard(batch)
    return batch


def int8_of(linear):
    layer = Int8Linear(linear)
    tensors = quantise_weight("weight", linear.weight.data)
    return layer.load_state_dict(tensors | ({} if linear.bias is None else {"bias": linear.bias.data})) and layer


def test_rows_come_back_within_half_a_step_and_use_the_whole_range():
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 4, 50)[:, None]
    values, scale = quantise_rows(x)
    assert values.dtype == torch.int8
    assert (values.abs().amax(dim=1) == 127).all()
    assert ((values * scale - x).abs() <= scale * 0.5001).all()


def test_a_row_of_zeros_stays_zero_and_a_nan_stays_a_nan():
    layer = int8_of(torch.nn.Linear(8, 4, bias=False))
    rows = torch.zeros(3, 8)
    rows[2, 5] = float("nan")
    found = layer(rows)
    assert (found[:2] == 0).all()
    assert found[2].isnan().all()


@pytest.mark.parametrize("bias", [True, False])
def test_the_layer_computes_what_its_rounded_weights_and_activations_say(bias):
    linear = torch.nn.Linear(48, 40, bias=bias)
    layer = int8_of(linear)
    x = torch.randn(2, 3, 48)
    values, scale = quantise_rows(x.view(6, 48))
    weight = layer.weight.double() * layer.weight_scale.double()[:, None]
    expected = (values.double() * scale.double()) @ weight.T + (linear.bias.double() if bias else 0)
    assert torch.allclose(layer(x).view(6, 40).double(), expected, atol=1e-5)


def test_no_token_depends_on_the_others_of_its_batch_nor_on_where_blocks_end():
    layer = int8_of(torch.nn.Linear(32, 24))
    x = torch.randn(2 * BLOCK_ROWS + 7, 32)
    x[0] *= 1e6  # one loud token must not drown the others
    together = layer(x)
    alone = torch.cat([layer(row[None]) for row in x])
    assert torch.equal(together, alone)


def test_a_stage_holds_what_the_plan_says_and_only_layers_are_int8(make_config, make_model):
    config = make_config(text={"num_hidden_groups": 2})
    folder = make_model(config)
    for stage in plan_shards(config, 3, dtype="int8").stages:
        shard = load_shard(folder, stage.spec, dtype="int8")
        assert shard.weight_bytes == stage.weight_bytes == weight_bytes(config, stage.spec, "int8")
        assert shard.weight_bytes < weight_bytes(config, stage.spec, "float32")
        shapes = shard_shapes(config, stage.spec)
        assert shard.num_parameters == sum(torch.Size(shape).numel() for shape in shapes.values())
        state = shard.state_dict()
        assert {name for name in state if not name.endswith("_scale")} == shapes.keys()
        for name, tensor in state.items():
            in_layers = "blocks" in name or "albert_layer_groups" in name or "mapping_in" in name
            is_linear = name.endswith(".weight") and tensor.dim() == 2 and in_layers
            assert tensor.dtype == (torch.int8 if is_linear else torch.float32), name
        assert not any(tensor.is_meta for tensor in (*shard.parameters(), *shard.buffers()))


def test_a_wide_model_takes_less_than_half_of_bfloat16_and_a_bit_more(make_config):
    config = make_config({"width": 512, "depth": 12}, {"hidden_size": 512, "intermediate_size": 2048})
    figures = {dtype: weight_bytes(config, whole_model(config), dtype) for dtype in ("float32", "bfloat16", "int8")}
    assert figures["float32"] / 4 < figures["int8"] < figures["bfloat16"] * 0.53
    assert cut_bytes(config, "vision", 3, "int8", 8) == cut_bytes(config, "vision", 3, "float32", 8)


def test_every_cut_of_an_int8_model_gives_the_same_bits_close_to_float32(make_config, make_model, make_batch):
    config = make_config({"depth": 2}, {"num_hidden_layers": 2})
    folder = make_model(config)
    batch = make_batch(config, frames=[1] * 12, tokens=range(1, 13))
    whole = load_shard(folder, whole_model(config), dtype="int8")(batch)
    with torch.no_grad():
        exact = load_towers(folder)(batch)
    for one, other in ((whole.vision, exact.vision), (whole.text, exact.text)):
        assert not torch.equal(one.values, other.values)
        assert torch.cosine_similarity(one.values, other.values).min() >= 0.999
    for vision, text in itertools.product(range(3), repeat=2):
        specs = [
            ShardSpec(LayerRange(0, vision), LayerRange(0, text)),
            ShardSpec(LayerRange(vision, 2), LayerRange(text, 2)),
        ]
        shards = [load_shard(folder, spec, dtype="int8") for spec in specs if len(spec.vision) + len(spec.text)]
        found = run(shards, batch)
        assert torch.equal(found.vision.values, whole.vision.values)
        assert torch.equal(found.text.values, whole.text.values)


@pytest.mark.medium
def test_one_thread_and_two_give_the_same_vectors(make_config, make_model, make_batch):
    """The engines differ in their threads; integer sums don't depend on them, and float32 sums of these sizes don't."""
    config = make_config({"width": 256, "num_heads": 4}, {"hidden_size": 256, "num_attention_heads": 4})
    shard = load_shard(make_model(config), whole_model(config), dtype="int8")
    batch = make_batch(config, frames=[1] * 24, tokens=[7] * 24)
    one = shard(batch)
    torch.set_num_threads(2)
    two = shard(batch)
    torch.set_num_threads(1)
    assert torch.equal(one.vision.values, two.vision.values)
    assert torch.equal(one.text.values, two.text.values)


PEAKS = """
import sys
from shards.shard_specs import vision_only, whole_model
from shards.model_config import load_model_config
from shards.shard import load_shard
def peak(): return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))
folder, dtype = sys.argv[1:]
config = load_model_config(folder)
import shards.layouts, timm.models.vision_transformer, safetensors.torch
before = peak()
shard = load_shard(folder, vision_only(config), dtype=dtype)
print(shard.weight_bytes, peak() - before)
"""


@pytest.fixture(scope="module")
def wide_model(make_config, tmp_path_factory):
    """A model whose largest tensor is 9.4 MB of 115 MB."""
    config = make_config({"width": 768, "depth": 4, "num_heads": 12})
    return init_model(config, tmp_path_factory.mktemp("models") / "wide", seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_loading_holds_one_tensor_beside_the_shard_neither_its_file_nor_a_wider_copy(wide_model, dtype):
    command = [sys.executable, "-c", PEAKS, str(wide_model), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    held, grown = map(int, done.stdout.split())
    assert grown < held + (50 << 20)
