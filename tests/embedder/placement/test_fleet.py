"""A fleet is used whole: by every node, by every GPU, by the share of it that the configuration gives."""

from pathlib import Path
from types import SimpleNamespace

import pytest

import embedder
from embedder.config import load_config
from embedder.config_toml.run_sections import ClusterConfig
from embedder.executors.capacity import type_selector
from embedder.placement.allocation import pin_replicas, place_replicas
from embedder.placement.fleet import MAX_THREADS, PROCESS_BYTES, Available, cpu_nodes, share_of
from embedder.placement.fleet_plan import plan_for_fleet
from embedder.placement.placement import Node
from embedder.placement.resources import allocate
from shards.model_config import load_model_config
from shards.plan import plan_shards

DEMO = load_model_config(Path(embedder.__file__).parent / "demo_model")
LARGE = DEMO.required_vision.model_copy(update={"image_size": 224, "width": 1024, "depth": 24, "num_heads": 16})
MODEL = SimpleNamespace(config=DEMO.model_copy(update={"vision": LARGE}), fingerprint="f")


def fleet_of(*nodes):
    nodes = tuple(Node(f"node {number}", *node, node_id=f"id {number}") for number, node in enumerate(nodes))
    return Available(sum(node.num_cpus for node in nodes), sum(node.num_gpus for node in nodes), nodes)


def gpu_node(num_cpus, num_gpus, device_type, number=0):
    name = f"{device_type} {number}"
    return Node(name, num_cpus, num_gpus, device_type=device_type, node_id=name)


def planned_for(available, **settings):
    config = load_config(overrides=settings)
    plan = plan_for_fleet(config.compute, MODEL, plan_shards(MODEL.config, config.num_stages), available)
    return config, plan, allocate(config.compute, available, plan.stages)


@pytest.mark.parametrize("num_gpus", range(2, 9))
def test_all_gpus_of_a_machine_are_used(num_gpus):
    _, _, allocation = planned_for(fleet_of((64, num_gpus)))
    assert sum(stage.num_gpus * stage.min_replicas for stage in allocation.stages) > num_gpus - 1
    assert allocation.min_gpus <= num_gpus


def test_stages_of_a_mixed_fleet_go_to_the_types_of_the_plan():
    nodes = (gpu_node(32, 4, "A100-80G"), gpu_node(16, 2, "L4", 0), gpu_node(16, 2, "L4", 1))
    available = Available(64, 8, nodes)
    config, _, allocation = planned_for(available, dtype="bfloat16")
    assert {name for stage in allocation.stages for name in stage.device_types} == {"A100-80G", "L4"}
    found = place_replicas(allocation, nodes)
    assert found is not None
    on_nodes = pin_replicas(config.stage, allocation, nodes, found)
    types = {node.node_id: node.device_type for node in nodes}
    for stage in on_nodes.stages:
        assert len(stage.node_ids) == stage.min_replicas
        assert {types[node_id] for node_id in stage.node_ids} <= stage.device_types


def test_a_plan_for_a_type_of_another_memory_is_placed_and_one_for_an_unknown_type_anywhere():
    available = Available(8, 2, (gpu_node(4, 1, "A100-40G"), gpu_node(4, 1, "A100-80G")))
    _, plan, _ = planned_for(available)
    for device, types in (("A100:60GB", "A100-40G,A100-80G"), ("A100:80GB", "A100-80G"), ("A100:40GB", "A100-40G")):
        stages = [stage.__class__(**vars(stage) | {"device": device, "num_gpus": 1.0}) for stage in plan.stages[:1]]
        (stage,) = allocate(load_config(overrides={"num_stages": 1}).compute, available, stages).stages
        selector = type_selector(stage.device_types, "ray.io/accelerator-type")
        assert selector == {"ray.io/accelerator-type": f"in({types})"}
    stages = [stage.__class__(**vars(plan.stages[0]) | {"device": "TPU", "num_gpus": 1.0}) for stage in plan.stages[:1]]
    (stage,) = allocate(load_config(overrides={"num_stages": 1}).compute, available, stages).stages
    assert stage.device_types == frozenset()


def test_stages_with_settings_of_their_own_fill_the_gpus_and_the_slowest_first():
    config = load_config(overrides={"num_stages": 2, "stage": [{"num_gpus": 0.5}, {"num_gpus": 1}]})
    allocation = allocate(config.compute, fleet_of((16, 3), (16, 3)))
    assert [stage.min_replicas for stage in allocation.stages] == [4, 4]
    fixed = load_config(overrides={"num_stages": 1, "stage": [{"num_gpus": 1, "replicas": {"min": 2, "max": 2}}]})
    assert allocate(fixed.compute, fleet_of((16, 8))).stages[0].min_replicas == 2


@pytest.mark.parametrize(
    ("num_cpus", "memory_bytes", "replicas"), [(2, 0, 1), (16, 0, 1), (64, 0, 3), (64, 8 * PROCESS_BYTES, 1)]
)
def test_a_large_node_has_several_replicas_as_far_as_its_memory_goes(num_cpus, memory_bytes, replicas):
    available = Available(num_cpus, 0, (Node("a", num_cpus, memory_bytes=memory_bytes),))
    assert len(cpu_nodes(available, 3, weight_bytes=0)) == replicas
    stages = allocate(load_config().compute, available).stages
    assert all(stage.num_threads <= MAX_THREADS or replicas == 1 for stage in stages)


def test_threads_are_those_of_the_node_that_a_replica_lands_on():
    available = fleet_of((4, 0), (16, 0))
    config = load_config()
    allocation = allocate(config.compute, available)
    stages = pin_replicas(config.stage, allocation, available.nodes, place_replicas(allocation, available.nodes)).stages
    assert [stage.min_replicas for stage in stages] == [2] * 3
    assert dict(stages[0].node_threads) == {"id 0": 1, "id 1": 5}
    own = load_config(overrides={"stage": [{"num_threads": 2}] * 3})
    assert (
        pin_replicas(own.stage, allocation, available.nodes, place_replicas(allocation, available.nodes))
        .stages[0]
        .node_threads
        == ()
    )


def test_every_node_keeps_room_for_a_task_where_it_can():
    available = fleet_of((2, 0), (2, 0))
    config = load_config(overrides={"num_stages": 2, "stage": [{"num_cpus": 0.5}, {"num_cpus": 0.5}]})
    (first, second) = place_replicas(allocate(config.compute, available), available.nodes)
    assert sorted(first) == sorted(second) == [0, 1]


def test_a_share_is_taken_of_every_node_and_bounds_hold():
    whole = fleet_of((8, 4), (4, 0))
    half = share_of(whole, ClusterConfig(share=0.5), is_cluster=True)
    assert (half.num_cpus, half.num_gpus, [node.num_cpus for node in half.nodes]) == (6, 2, [4, 2])
    assert not half.can_grow
    held = share_of(whole, ClusterConfig(max_cpus=3, max_gpus=1), is_cluster=True)
    assert (held.num_cpus, held.num_gpus, held.can_grow) == (3, 1, False)
    _, _, allocation = planned_for(held)
    assert sum(stage.num_gpus * stage.min_replicas for stage in allocation.stages) <= 1
    assert allocation.min_cpus <= 3


def test_a_cluster_that_may_grow_is_not_refused_for_what_it_lacks_yet():
    empty = Available(0)
    grown = share_of(empty, ClusterConfig(max_cpus=4), is_cluster=True)
    assert grown.can_grow
    config = load_config(overrides={"num_stages": 1, "stage": [{"num_cpus": 1, "replicas": {"min": 1, "max": 3}}]})
    (stage,) = allocate(config.compute, grown).stages
    assert (stage.min_replicas, stage.max_replicas) == (1, 3)
    assert not share_of(Available(2), ClusterConfig(max_cpus=4), is_cluster=False).can_grow


def test_gpus_that_are_yet_to_come_cost_no_warning_and_those_that_are_there_say_the_type(caplog):
    to_come = share_of(Available(2, 0, (Node("a", 2),)), ClusterConfig(max_cpus=16, max_gpus=4), is_cluster=True)
    config, plan, allocation = planned_for(to_come)
    assert plan == plan_shards(MODEL.config, config.num_stages)
    assert caplog.messages == []
    assert all(stage.num_gpus > 0 for stage in allocation.stages)
    begun = share_of(Available(8, 1, (gpu_node(8, 1, "L4"),)), ClusterConfig(max_gpus=4), is_cluster=True)
    assert {stage.device for stage in planned_for(begun)[1].stages} == {"L4"}
