"""The planner's table gives what was measured on an H100 and an H200: forward passes of towers, products, copies."""

import pytest
from gpu_simulation import MODELS

from shards.planning.devices import DEVICES
from shards.planning.planning_costs import estimate_costs
from shards.ranges import LayerRange

H100 = DEVICES["H100"]
# Inputs a second of the libraries' own towers in bfloat16, by device, model and side, in batches of BATCHES.
RATES = {
    ("H100", "vit-l-14", "vision"): (2_167, 2_223, 2_251),
    ("H100", "vit-l-14", "text"): (15_443, 52_461, 86_606),
    ("H100", "vit-b-32", "vision"): (16_725, 25_273, 27_276),
    ("H200", "vit-l-14", "vision"): (2_343, 2_339, 2_368),
    ("H200", "vit-l-14", "text"): (14_049, 68_416, 95_609),
    ("H200", "vit-b-32", "vision"): (17_240, 27_848, 29_454),
    ("H200", "so400m-384", "vision"): (489, 496),
}
BATCHES = (64, 256, 1024)


@pytest.mark.parametrize(("device", "name", "side"), RATES)
def test_the_table_gives_the_rates_that_were_measured(device, name, side):
    config = MODELS[name]()
    for num_rows, measured in zip(BATCHES, RATES[device, name, side], strict=False):
        costs = estimate_costs(config, DEVICES[device], "bfloat16", caption_tokens=16, num_rows=num_rows)
        seconds = getattr(costs, side).of(LayerRange(0, config.num_layers[side]), config.num_layers[side])
        assert 1 / seconds == pytest.approx(measured, rel=0.2), num_rows


@pytest.mark.parametrize(("num_rows", "measured"), [(32, 2_148), (256, 2_262)])
def test_the_table_gives_the_rates_of_a_shard_of_images(num_rows, measured):
    config = MODELS["vit-l-14"]()
    costs = estimate_costs(config, H100, "bfloat16", num_rows=num_rows)
    assert 1 / costs.vision.of(LayerRange(0, 24), 24) == pytest.approx(measured, rel=0.2)


def test_products_and_copies_are_as_fast_as_measured():
    assert H100.gpu.product_flops["bfloat16"] == pytest.approx(682e12, rel=0.2)
    assert H100.bandwidth_bytes_per_s == pytest.approx(55e9, rel=0.2)


def test_a_small_batch_is_bound_by_launches_and_a_large_one_is_not():
    config = MODELS["vit-l-14"]()
    per_batch = [
        num_rows * estimate_costs(config, H100, "bfloat16", num_rows=num_rows).text.layer_s
        for num_rows in (8, 32, 1024)
    ]
    assert per_batch[0] == per_batch[1] < per_batch[2]
