"""What was measured on an H100 and an H200 follows from the figures of both models of them.

The planner's table has the libraries' towers, products and copies. The simulated H100 has a shard and a stage whose
captions are grouped as on a CPU, 32 of them in 4 groups and 256 in 7; today's code groups them so only there. The
table counts the launches of layers, not what arranges a group, and takes such captions for twice as fast.

No term of either has the 352 rows/s of a stage whose two threads both launch, nor the runs on Ray with such a stage, of
262 and 223 pairs/s: that code is gone. Rates from photographs were bound by the cores that decode them.
"""

import pytest
import torch
from gpu_simulation import H100 as SIMULATED
from gpu_simulation import (
    MODELS,
    Launching,
    SimulatedGpu,
    SimulatedStage,
    fused_attention,
    rows_of,
    sample_states,
    shard_of_shapes,
    write_config,
)

from embedder.steps.stage_spec import StageSpec
from shards.activations import Batch
from shards.planning.devices import DEVICES
from shards.planning.planning_costs import STARTUP_S, estimate_costs
from shards.ranges import LayerRange
from shards.shard_specs import whole_model

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


def test_products_and_copies_are_as_fast_as_measured_and_a_run_starts_as_soon():
    assert H100.gpu.product_flops["bfloat16"] == pytest.approx(682e12, rel=0.2)
    assert H100.bandwidth_bytes_per_s == pytest.approx(55e9, rel=0.2)
    assert pytest.approx(13.5, rel=0.2) == STARTUP_S


class OneThreadGpu(SimulatedGpu):
    """Simulated H100 whose host does one thing at a time: its clock is the sum of what it did, and nothing sleeps."""

    host_s = 0.0

    @property
    def now_s(self):
        return self.host_s

    def spend(self, seconds):
        self.host_s += seconds

    def wait_until(self, at_s):
        self.host_s = max(self.host_s + self.figures.wait_s, at_s)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("sides", "num_rows", "measured"),
    [
        ("vision", 32, 2_148),
        ("vision", 256, 2_262),
        ("text", 32, 1_009),
        ("text", 256, 4_425),
        ("vision text", 32, 748),
    ],
)
def test_the_simulated_gpu_gives_the_rates_of_a_shard_in_the_groups_of_a_cpu(sides, num_rows, measured):
    config, gpu = MODELS["vit-l-14"](), OneThreadGpu(SIMULATED, slowness=1)
    shard, states = shard_of_shapes(config, whole_model(config)), sample_states(config, num_rows)
    with fused_attention(gpu), Launching(gpu), torch.inference_mode():
        shard(Batch(*(states[side] if side in sides else None for side in ("vision", "text"))))
        gpu.synchronize()
    assert num_rows / gpu.now_s == pytest.approx(measured, rel=0.2)


@pytest.mark.medium
@pytest.mark.parametrize(("num_rows", "batch_size", "measured"), [(64, 32, 632), (256, 256, 1_512)])
def test_the_simulated_gpu_gives_the_rates_of_a_stage_with_one_call_at_a_time(num_rows, batch_size, measured, tmp_path):
    config, gpu = MODELS["vit-l-14"](), OneThreadGpu(SIMULATED, slowness=1)
    folder = write_config(config, tmp_path)
    spec = StageSpec(0, str(folder), whole_model(config), "bfloat16", "meta", 1, (batch_size,), calls_at_once=1)
    stage, block = SimulatedStage(spec, gpu).load(), rows_of(sample_states(config, num_rows), num_rows)
    with fused_attention(gpu):
        stage(block)
        started_s = gpu.now_s
        stage(block)
    assert num_rows / (gpu.now_s - started_s) == pytest.approx(measured, rel=0.2)


def test_a_small_batch_is_bound_by_launches_and_a_large_one_is_not():
    config = MODELS["vit-l-14"]()
    per_batch = [
        num_rows * estimate_costs(config, H100, "bfloat16", num_rows=num_rows).text.layer_s
        for num_rows in (8, 32, 1024)
    ]
    assert per_batch[0] == per_batch[1] < per_batch[2]
