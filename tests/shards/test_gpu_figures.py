"""The planner's table gives what was measured on an H100 and an H200: forward passes of towers, products, copies."""

import pytest
from gpu_simulation import MODELS

from shards.planning.costs import estimate_costs
from shards.planning.devices import DEVICES
from shards.ranges import LayerRange

H100 = DEVICES["H100"]
# Inputs a second of the libraries' own towers in bfloat16, by model, side and batch.
MEASURED = [
    ("vit-l-14", "vision", 64, 2_167),
    ("vit-l-14", "vision", 256, 2_223),
    ("vit-l-14", "vision", 1024, 2_251),
    ("vit-l-14", "text", 64, 15_443),
    ("vit-l-14", "text", 256, 52_461),
    ("vit-l-14", "text", 1024, 86_606),
    ("vit-b-32", "vision", 64, 16_725),
    ("vit-b-32", "vision", 256, 25_273),
    ("vit-b-32", "vision", 1024, 27_276),
]
MEASURED_H200 = [
    ("vit-l-14", "vision", 64, 2_343),
    ("vit-l-14", "vision", 256, 2_339),
    ("vit-l-14", "vision", 1024, 2_368),
    ("vit-l-14", "text", 64, 14_049),
    ("vit-l-14", "text", 256, 68_416),
    ("vit-l-14", "text", 1024, 95_609),
    ("vit-b-32", "vision", 64, 17_240),
    ("vit-b-32", "vision", 256, 27_848),
    ("vit-b-32", "vision", 1024, 29_454),
    ("so400m-384", "vision", 64, 489),
    ("so400m-384", "vision", 256, 496),
]


@pytest.mark.parametrize(
    ("device", "name", "side", "num_rows", "measured"),
    [("H100", *each) for each in MEASURED] + [("H200", *each) for each in MEASURED_H200],
)
def test_the_table_gives_the_rates_that_were_measured(device, name, side, num_rows, measured):
    config = MODELS[name]()
    costs = estimate_costs(config, DEVICES[device], "bfloat16", caption_tokens=16, num_rows=num_rows)
    seconds = getattr(costs, side).of(LayerRange(0, config.num_layers[side]), config.num_layers[side])
    assert 1 / seconds == pytest.approx(measured, rel=0.2)


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
