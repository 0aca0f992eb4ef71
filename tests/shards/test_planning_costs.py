"""Costs, workloads, devices and grids of the planner."""

import itertools

import numpy as np
import pytest

from shards.model_errors import ModelError
from shards.planning.devices import DEVICES, cpu_core, parse_devices, with_slow_float16
from shards.planning.planning_costs import DataMix, HostCosts, ModelCosts, TowerSeconds, estimate_costs, estimate_host
from shards.planning.problem import make_problem
from shards.planning.solver.grid import make_grid
from shards.ranges import LayerRange
from shards.shard_specs import ShardSpec


def test_front_and_head_come_with_the_first_and_the_last_layer():
    tower = TowerSeconds(front_s=10, layer_s=1, head_s=100)
    ranges = [LayerRange(0, 0), LayerRange(0, 1), LayerRange(1, 3), LayerRange(3, 4), LayerRange(0, 4)]
    assert [tower.of(layers, 4) for layers in ranges] == [0, 11, 2, 101, 114]


def test_costs_at_another_caption_length_are_those_estimated_for_it(make_config):
    config = make_config()
    short, long = (estimate_costs(config, DEVICES["CPU"], "float32", tokens) for tokens in (8, 20))
    scaled = short.at_mix(DataMix(caption_tokens=20), config)
    assert scaled.text.layer_s == pytest.approx(long.text.layer_s)
    assert scaled.text.front_s == pytest.approx(long.text.front_s)
    assert scaled.text.head_s == long.text.head_s
    assert (scaled.vision, scaled.caption_tokens) == (long.vision, 20)


def test_costs_survive_json_and_strangers_are_refused(make_config):
    costs, host = estimate_costs(make_config(), DEVICES["T4"], "float16"), estimate_host(make_config())
    assert ModelCosts.from_json(costs.to_json()) == costs
    assert HostCosts.from_json(host.to_json()) == host
    for text in ("", "{}", costs.to_json().replace('"call_s"', '"calls"')):
        with pytest.raises(ModelError, match="costs:"):
            ModelCosts.from_json(text)


def test_a_device_refuses_a_dtype_that_it_does_not_compute_in(make_config):
    with pytest.raises(
        ModelError, match=r"T4: it doesn't compute in bfloat16; give --dtype float16 or float32 or int8"
    ):
        estimate_costs(make_config(), DEVICES["T4"], "bfloat16")


def test_a_core_is_as_fast_in_bfloat16_as_its_instructions_make_it(make_config):
    def layer_s(core, dtype):
        return estimate_costs(make_config(), core, dtype).vision.layer_s

    with_it, without = cpu_core(has_bf16=True), cpu_core(has_bf16=False)
    assert layer_s(with_it, "float32") == layer_s(without, "float32") == layer_s(DEVICES["CPU"], "float32")
    assert layer_s(with_it, "bfloat16") == pytest.approx(layer_s(with_it, "float32") / 2)
    assert layer_s(without, "bfloat16") == pytest.approx(layer_s(without, "float32") * 6)
    assert DEVICES["CPU"] == without, "of a CPU that nobody has looked at no plan expects the instructions"


def test_float16_is_not_for_cpus_but_beside_gpus_that_need_it(make_config):
    with pytest.raises(ModelError, match="CPU: it doesn't compute in float16"):
        estimate_costs(make_config(), DEVICES["CPU"], "float16")
    beside = with_slow_float16(DEVICES["CPU"])
    assert beside.flops_in("float16") < beside.flops_in("float32")
    assert with_slow_float16(DEVICES["T4"]) is DEVICES["T4"]


@pytest.mark.parametrize(
    ("values", "message"),
    [((-1, 1, 16), "images_per_item"), ((float("nan"), 1, 16), "images_per_item"), ((0, 0, 16), "neither"),
     ((1, 1, 0), "caption_tokens"), ((1, float("inf"), 16), "captions_per_item")],
)  # fmt: skip
def test_a_mix_that_is_none_is_refused(values, message):
    with pytest.raises(ModelError, match=message):
        DataMix(*values)


def test_a_fleet_is_read_with_memory_and_prices():
    fleet = parse_devices("2xA100:80GB@1.80, 4xt4 ,8xCPU")
    assert [(num, device.name, device.kind) for num, device in fleet] == [
        (2, "A100:80GB", "gpu"), (4, "T4", "gpu"), (8, "CPU", "cpu"),
    ]  # fmt: skip
    assert (fleet[0][1].memory_bytes, fleet[0][1].price_per_h) == (80 * 10**9, 1.8)
    assert (fleet[1][1].memory_bytes, fleet[1][1].price_per_h) == (16 * 10**9, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no entry"), ("A100", "no entry"), ("2xA100:80", "no entry"), ("2xA100:0GB", "has no memory"),
        ("-1xT4", "no entry"), ("0xT4", "has none"),
        ("2xB9000", "take one of T4"), ("2xT4,3xT4", "twice"),
        ("1xT4,1xA10,1xL4,1xCPU", "up to 3"), ("2xT4,", "no entry"),
    ],
)  # fmt: skip
def test_a_fleet_that_is_none_is_refused(text, message):
    with pytest.raises(ModelError, match=message):
        parse_devices(text)


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_grid_has_the_costs_of_each_of_its_stages(make_config, groups, dtype):
    config = make_config({"depth": 3}, {"num_hidden_layers": 5, "num_hidden_groups": groups})
    fleet = parse_devices("1xA10, 4xCPU")
    costs = {device.name: estimate_costs(config, device, dtype) for _, device in fleet}
    problem = make_problem(config, fleet, costs, estimate_host(config), mix=DataMix(0.5, 3.0, 9), dtype=dtype)
    grid = make_grid(problem, range(4), range(6), min_layers=0)
    for (row, column), (number, pool) in itertools.product(
        np.ndindex(len(grid.vision.starts), len(grid.text.starts)), enumerate(problem.pools)
    ):
        vision = LayerRange(int(grid.vision.starts[row]), int(grid.vision.stops[row]))
        text = LayerRange(int(grid.text.starts[column]), int(grid.text.stops[column]))
        if not len(vision) and not len(text):
            assert np.isinf(grid.costs[number].seconds[row, column])
            continue
        load = problem.load(pool, ShardSpec(vision, text))
        assert grid.costs[number].seconds[row, column] == pytest.approx(load.seconds)
        assert grid.costs[number].cpu_seconds[row, column] == pytest.approx(load.cpu_seconds)
        assert grid.costs[number].memory[row, column] == pytest.approx(load.memory_bytes, abs=1)
