"""Types of a cluster's nodes, and the problem that they and their costs state."""

import re

import pytest

from embedder.config import load_config
from embedder.errors import ConfigError
from embedder.placement.compute_dtype import DtypeChoice
from embedder.placement.placement import Node
from embedder.plugins.plan.cluster_costs import ClusterCosts, TypeCosts, problem_of_cluster
from embedder.plugins.plan.node_types import NodeHardware, node_types
from shards.model_config import ModelConfig
from shards.plan import plan_placement
from shards.planning.devices import DEVICES, device_of_ray_type
from shards.planning.planning_costs import DataMix, HostCosts, estimate_costs
from shards.preprocess import PreprocessConfig
from shards.towers.vit import VitTower

GIB = 1 << 30
LABEL = "type"
RAY_LABEL = "ray.io/accelerator-type"
MODEL = ModelConfig(
    name="deep",
    trained=False,
    embedding_dim=256,
    vision=VitTower(width=384, depth=12, num_heads=6, patch_size=16),
    text={"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "intermediate_size": 1536},
    preprocess=PreprocessConfig(),
)


def facts(name, cpus=4.0, cores=None, cpu="Xeon", **node):
    """One node; `cores` is what a quota leaves of its CPUs."""
    return NodeHardware(Node(name, cpus, **node), cpus if cores is None else cores, 8 * GIB, {"cpu": cpu})


def test_nodes_are_of_the_type_of_their_label_or_gpu_and_others_are_cpus():
    nodes = [
        facts("a", num_gpus=2, gpu_type="T4", device_type="T4"),
        facts("b", num_gpus=1, gpu_type="T4", device_type="T4"),
        facts("c", num_gpus=1),
        facts("d", cores=2.0),
        facts("e", cpus=8.0, cores=4.0),
    ]
    found = {each.name: each for each in node_types(nodes, RAY_LABEL)}
    assert {name: [facts.node.name for facts in each.nodes] for name, each in found.items()} == {
        "T4": ["a", "b"],
        "GPU": ["c"],
        "CPU": ["d", "e"],
    }
    assert (found["T4"].num_gpus, found["T4"].cores, found["CPU"].num_gpus, found["CPU"].cores) == (3, 8.0, 0, 6.0)


def test_labels_tell_cpu_nodes_apart():
    nodes = [facts("a", device_type="slow", cores=2.0), facts("b", device_type="fast"), facts("c", device_type="fast")]
    assert [(each.name, len(each.nodes), each.cores) for each in node_types(nodes, LABEL)] == [
        ("fast", 2, 8.0),
        ("slow", 1, 2.0),
    ]


@pytest.mark.parametrize(
    "other", [{"cores": 2.0}, {"cpu": "EPYC"}, {"device_type": "slow"}], ids=["a quota", "another CPU", "a label"]
)
@pytest.mark.parametrize(("type_label", "advised"), [(RAY_LABEL, "type"), ("zone", "zone")])
def test_cpu_nodes_that_a_plan_could_not_name_are_refused_with_the_cure(other, type_label, advised):
    expected = f"--labels={advised}=TYPE.*cluster.type_label={advised}$"
    with pytest.raises(ConfigError, match=expected) as error:
        node_types([facts("a"), facts("b", **other)], type_label)
    assert re.search(r"\ba \(4 cores of Xeon\)", str(error.value))


def test_a_label_of_nodes_with_and_without_gpus_is_refused():
    with pytest.raises(ConfigError, match="both pool"):
        node_types([facts("a", device_type="pool"), facts("b", device_type="pool", num_gpus=1)], LABEL)


def test_more_types_than_a_plan_takes_are_refused():
    with pytest.raises(ConfigError, match="4 types of nodes"):
        node_types([facts(name, device_type=name) for name in "abcd"], LABEL)


def cluster(nodes, slowness=None, core_share=None):
    """Costs of types: those of a core of the table, times the slowness of the type."""
    types = node_types(nodes, LABEL)
    costs = {}
    for each in types:
        device = DEVICES["T4"] if each.num_gpus else DEVICES["CPU"]
        factor = (slowness or {}).get(each.name, 1.0)
        estimate = estimate_costs(MODEL, device, "float32")
        host = HostCosts(*(factor * seconds for seconds in (1e-3, 1e-4, 1e-4)), 0.0, 11.0, "measured")
        costs[each.name] = TypeCosts(
            estimate, host, 16 * GIB if each.num_gpus else 0, (core_share or {}).get(each.name, 1.0)
        )
    return ClusterCosts(types, costs, DtypeChoice("float32", "as configured", was_asked=True))


def test_the_slower_of_two_cores_gets_the_smaller_part_and_all_cores_are_used():
    """One core, and one held to a half of it: the plan makes use of one and a half."""
    config = load_config(overrides={"num_stages": 2, "batch_size": 32})
    nodes = [facts("a", cpus=1.0, device_type="whole"), facts("b", cpus=1.0, device_type="half")]
    found = cluster(nodes, core_share={"half": 0.5})
    problem = problem_of_cluster(config.compute, MODEL, found, DataMix())
    assert [(pool.device.name, pool.num, pool.core_speed) for pool in problem.pools] == [
        ("half", 0.5, 1.0),
        ("whole", 1.0, 1.0),
    ]
    assert problem.num_cores == 1.5
    plan = plan_placement(problem, 2)
    assert {stage.device for stage in plan.stages} == {"half", "whole"}
    seconds = {stage.device: stage.seconds_per_item for stage in plan.stages}
    assert seconds["half"] < seconds["whole"]
    for stage in plan.stages:
        cores = {"half": 0.5, "whole": 1.0}[stage.device]
        assert plan.items_per_s * stage.seconds_per_item <= cores * (1 + 1e-6)
    spent = sum(stage.seconds_per_item for stage in plan.stages) + problem.host_seconds
    assert 0.9 < plan.items_per_s * spent / 1.5 < 1 + 1e-6


def test_cores_of_another_speed_count_by_what_they_do_outside_the_stages():
    config = load_config(overrides={"num_stages": 2, "batch_size": 32})
    nodes = [facts("a", device_type="fast"), facts("b", device_type="slow"), facts("c", num_gpus=2, device_type="T4")]
    problem = problem_of_cluster(config.compute, MODEL, cluster(nodes, {"slow": 2.0, "T4": 4.0}), DataMix())
    speeds = {pool.device.name: (pool.num, pool.core_speed, pool.shared) for pool in problem.pools}
    assert speeds == {
        "fast": (4.0, 1.0, True),
        "slow": (4.0, pytest.approx(0.5), True),
        "T4": (2, pytest.approx(0.25), False),
    }
    assert problem.num_cores == pytest.approx(4.0 + 2.0 + 1.0)
    memory = {pool.device.name: (pool.device.memory_bytes, pool.node_memory_bytes) for pool in problem.pools}
    assert memory == {"fast": (2 * GIB, 8 * GIB), "slow": (2 * GIB, 8 * GIB), "T4": (16 * GIB, None)}


def test_costs_of_a_type_are_kept_as_text():
    (kept,) = cluster([facts("a")]).costs.values()
    assert TypeCosts.from_json(kept.to_json()) == kept


@pytest.mark.parametrize(
    ("ray_name", "memory_gb", "like"),
    [("T4", 16, "T4"), ("A10G", 24, "A10"), ("A100-80G", 80, "A100"), ("L40S", 48, "L40S")],
)
def test_gpus_as_ray_calls_them_are_found_in_the_table(ray_name, memory_gb, like):
    device = device_of_ray_type(ray_name)
    assert (device.name, device.memory_bytes, device.flops) == (ray_name, memory_gb * 10**9, DEVICES[like].flops)
