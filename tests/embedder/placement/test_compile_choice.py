"""Which stages compile their layers: as the configuration says, or where the run repays it."""

from dataclasses import replace

import pytest
from tiny_models import tiny_config

from embedder.config import load_config
from embedder.placement.allocation import StageResources
from embedder.placement.compile_choice import COMPILE_S, GAIN, estimated_s, is_compiled
from embedder.placement.device_settings import gpu_type
from shards.plan import plan_shards
from shards.planning.devices import DEVICES
from shards.ranges import LayerRange
from shards.shard_specs import ShardSpec

BREAK_EVEN_S = COMPILE_S / (1 - 1 / GAIN)


def on(device, max_replicas=1):
    return StageResources(1, max_replicas, 1, float(device == "cuda"), 1, device)


@pytest.fixture(scope="module")
def stage():
    """A stage of both towers that takes a millisecond for an item."""
    return replace(plan_shards(tiny_config(), 1).stages[0], seconds_per_item=1e-3)


def chosen(stage, num_items=None, resources=None, **settings):
    return is_compiled(load_config(None, settings).compute, stage, resources or on("cuda"), num_items, ("H100",))


def test_what_the_configuration_says_holds_on_every_device(stage):
    for device in ("cpu", "cuda"):
        assert chosen(stage, 1, on(device), compile=True)
        assert not chosen(stage, 10**9, on(device), compile=False)


def test_auto_compiles_on_gpus_alone_and_in_long_runs_alone(stage):
    most = round(3 * BREAK_EVEN_S / 1e-3)  # captions have two forms, images one
    assert not chosen(stage, most - 1)
    assert chosen(stage, most + 1)
    assert not chosen(stage, 10**9, on("cpu"))
    assert not chosen(stage, None)


def test_auto_counts_what_a_replica_computes_and_the_towers_that_it_has(stage):
    most = round(3 * BREAK_EVEN_S / 1e-3)
    assert not chosen(stage, most + 1, on("cuda", max_replicas=2))
    assert chosen(stage, 2 * most + 2, on("cuda", max_replicas=2))
    images = replace(stage, spec=ShardSpec(LayerRange(0, 2), LayerRange(0, 0)))
    assert chosen(images, most // 3 + 1)
    assert not chosen(images, most // 3 - 1)


@pytest.mark.parametrize("compile_", ["auto", True])
def test_int8_is_never_compiled(stage, compile_):
    assert not chosen(stage, 10**9, compile=compile_, dtype="int8")


def test_without_seconds_operations_over_the_fastest_gpus_rate_count(stage):
    unmeasured = replace(stage, seconds_per_item=None, flops_per_image=3e12, flops_per_caption=1e12)
    slow, fast = (estimated_s(unmeasured, "float16", [name]) for name in ("T4", "H100"))
    assert slow > fast == estimated_s(unmeasured, "float16", ["T4", "H100"]) > 0
    assert estimated_s(unmeasured, "float16", []) == estimated_s(unmeasured, "float16", ["A100"])
    assert estimated_s(unmeasured, "bfloat16", ["T4"]) == 0  # which doesn't compute in it


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("H100", "H100"),
        ("NVIDIA H100 80GB", "H100"),
        ("H100:80GB", "H100"),
        ("NVIDIA L4", "L4"),
        ("B9000", "A100"),
    ],
)
def test_a_gpu_is_found_by_each_of_its_names(name, known):
    assert gpu_type(name).flops == DEVICES[known].flops
