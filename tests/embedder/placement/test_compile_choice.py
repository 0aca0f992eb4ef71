"""Which stages compile their layers: as the configuration says, or where the run repays it."""

from dataclasses import replace

import pytest
from gpu_simulation import MODELS
from tiny_models import tiny_config

from embedder.config import load_config
from embedder.placement.allocation import StageResources
from embedder.placement.compile_choice import COMPILE_S, GAIN, as_compiled, estimated_s, is_compiled
from embedder.placement.device_settings import gpu_type
from shards.plan import plan_shards
from shards.planning.devices import DEVICES
from shards.planning.planning_costs import estimate_costs
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
        ("NVIDIA A10G", "A10"),
        ("B9000", "A100"),
    ],
)
def test_a_gpu_is_found_by_each_of_its_names(name, known):
    assert gpu_type(name).flops == DEVICES[known].flops


@pytest.mark.parametrize(
    ("device", "name", "measured"),
    [("H100", "vit-l-14", 2_784), ("H200", "vit-l-14", 2_902), ("H100", "vit-b-32", 31_514)],
)
def test_the_table_gives_the_rates_of_compiled_towers_that_were_measured(device, name, measured):
    config, compute = MODELS[name](), load_config().compute
    eager = estimate_costs(config, DEVICES[device], "bfloat16", num_rows=256 if name == "vit-l-14" else 1024)
    compiled = as_compiled(eager, compute, config)
    seconds = compiled.vision.of(LayerRange(0, config.num_layers["vision"]), config.num_layers["vision"])
    assert 1 / seconds == pytest.approx(measured, rel=0.2)
    assert compiled.vision.front_s == eager.vision.front_s


def test_layers_count_as_eager_where_no_run_compiles_them():
    config = MODELS["vit-l-14"]()
    for device, dtype, settings in (
        ("H100", "bfloat16", {"compile": False}),
        ("CPU", "bfloat16", {}),
        ("H100", "float32", {}),
    ):
        eager = estimate_costs(config, DEVICES[device], dtype)
        assert as_compiled(eager, load_config(overrides=settings).compute, config) == eager
