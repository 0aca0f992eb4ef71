"""What the layers of a stage reach of its GPU's matrix-product rate."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from gpu_simulation import MODELS
from published_models import PUBLISHED

from embedder.batch_schema import Measurement
from embedder.cli.render_report import product_line
from embedder.report.product_share import item_flops, product_shares, slowest_speed
from embedder.report.step_sums import split_loads, step_reports
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
    shares = product_shares(steps, loads, shards, CONFIG, mix, num_items=1000)
    assert shares == {"stage 0": pytest.approx(1000 * item_flops(CONFIG, first, mix) / 0.5 / 600e12)}
    assert product_line(steps[1].model_copy(update={"product_share": shares["stage 0"]})) == (
        "GPU of stage 0: while it computed, its layers reached 28 % of the rate of wide matrix products"
    )
    assert product_line(steps[2]) is None, "its GPU was not measured"


def test_where_pictures_keep_their_proportions_no_share_is_claimed():
    """A picture has as many patches as it has, which nothing counts; by the most it would be several times as much."""
    loads, calls = split_loads(calls_of(SPEED, SPEED))
    steps, _ = step_reports(calls, {"stage 0": 1, "stage 1": 1})
    with TemporaryDirectory() as folder:
        naflex = PUBLISHED["SigLIP 2 B/16 NaFlex"].describe(Path(folder))
    shards = [whole_model(naflex)]
    assert product_shares(steps, loads, shards, naflex, DataMix(), 1000) == {}
    assert product_shares(steps, loads, shards, naflex, DataMix(image_patches=256), 1000)["stage 0"] > 0


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
