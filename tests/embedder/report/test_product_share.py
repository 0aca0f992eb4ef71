"""What the layers of a stage reach of its GPU's matrix-product rate."""

import pytest
from gpu_simulation import MODELS

from embedder.cli.render_report import product_line
from embedder.report.product_share import item_flops, slowest_speed, with_product_shares
from embedder.report.step_sums import split_loads, step_reports
from embedder.store.journal.step_metrics import Measurement
from shards.planning.devices import DEVICES
from shards.planning.planning_costs import DataMix, DeviceSpeed, estimate_costs
from shards.ranges import LayerRange
from shards.shard_specs import ShardSpec, whole_model

SPEED = {"product_flops": 600e12, "product_width": 8192.0, "memory_bytes_per_s": 3e12, "link_bytes_per_s": 5e10}
CONFIG = MODELS["vit-l-14"]()


def calls_of(*speeds):
    """Two stages on GPUs of some speeds, and decoding; 1,000 items in all."""
    starts = [Measurement(f"load {number}", device_speed=speed) for number, speed in enumerate(speeds)]
    stages = [Measurement(f"stage {number}", started_s=9.0, wall_s=0.5, num_rows=1000) for number in range(2)]
    return [*starts, Measurement("decode", started_s=8.0, wall_s=4.0, num_rows=1000), *stages]


def test_a_stage_reaches_the_share_that_its_layers_take_of_the_rate():
    loads, calls = split_loads(calls_of(SPEED, {}))
    steps, _ = step_reports(calls, {"stage 0": 1, "stage 1": 1})
    first = ShardSpec(LayerRange(0, 12), LayerRange(0, 6))
    shards, mix = [first, ShardSpec(LayerRange(12, 24), LayerRange(6, 12))], DataMix(caption_tokens=16)
    decode, *stages = with_product_shares(steps, loads, shards, CONFIG, mix, num_items=1000)
    assert stages[0].product_share == pytest.approx(1000 * item_flops(CONFIG, first, mix) / 0.5 / 600e12)
    assert (decode.product_share, stages[1].product_share) == (None, None), "its GPU was not measured"
    assert product_line(stages[0]) == (
        "GPU of stage 0: while it computed, its layers reached 28 % of the rate of wide matrix products"
    )
    assert product_line(stages[1]) is None


def test_the_operations_of_an_item_are_those_of_the_published_figures():
    """162 GFLOP for an image (Source: OpenAI's CLIP, ViT-L/14 at 224 px, twice its 81 G multiply-adds)."""
    whole = item_flops(CONFIG, whole_model(CONFIG), DataMix(captions_per_item=0.0))
    assert whole == pytest.approx(162e9, rel=0.03)
    assert item_flops(CONFIG, whole_model(CONFIG), DataMix()) > whole


def test_the_slowest_of_several_gpus_counts():
    loads, _ = split_loads(calls_of(SPEED, SPEED | {"product_flops": 400e12}))
    assert slowest_speed(loads).product_flops == 400e12
    assert slowest_speed(loads, stage=0).product_flops == 600e12
    assert slowest_speed(split_loads(calls_of({}, {}))[0]) is None


def test_a_measured_speed_takes_the_place_of_the_tables():
    h100 = DEVICES["H100"]
    wide = h100.gpu.product_flops["bfloat16"] * 8192 / (8192 + h100.gpu.half_width)
    link, memory = h100.bandwidth_bytes_per_s, h100.gpu.memory_bytes_per_s
    same = DeviceSpeed(wide, 8192, memory, link).apply_to(h100, "bfloat16")
    assert estimate_costs(CONFIG, same, "bfloat16") == estimate_costs(CONFIG, h100, "bfloat16")
    half = DeviceSpeed(wide / 2, 8192, memory / 2, link / 2).apply_to(h100, "bfloat16")
    slow, usual = (estimate_costs(CONFIG, device, "bfloat16") for device in (half, h100))
    assert 1.9 < slow.vision.layer_s / usual.vision.layer_s <= 2
    core = DEVICES["CPU"]
    assert DeviceSpeed(wide, 8192, memory, link).apply_to(core, "float32") == core
