"""Requests that would hang forever are refused; defaults always fit; heavier stages have the higher priority."""

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from gpu_simulation import MODELS

from embedder.config import load_config
from embedder.errors import ConfigError
from embedder.executors.job import ray_store_bytes
from embedder.models.model_folder import Model
from embedder.placement import hardware, resources
from embedder.placement.allocation import pin_replicas, place_replicas
from embedder.placement.device_settings import GPU_SETTINGS
from embedder.placement.fleet import Available
from embedder.placement.placement import Node
from embedder.placement.resources import (
    MAX_NICENESS,
    allocate,
    beside_models,
    describe_devices,
    describe_limits,
    model_resources,
    niceness_by_work,
    object_store_bytes,
    request_resources,
)
from embedder.servables.packing import ActorGroup
from shards.plan import PlannedStage, ShardSpec, plan_shards
from shards.ranges import LayerRange


@pytest.mark.parametrize("num_cpus", [1, 2, 3, 4, 8, 16, 96])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 6])
def test_the_defaults_fit_every_machine(num_cpus, num_stages):
    allocation = allocate(load_config(overrides={"num_stages": num_stages}).compute, Available(num_cpus))
    assert allocation.min_cpus <= num_cpus
    assert allocation.decode_cpus > 0


def test_more_than_there_is_is_refused_where_decode_has_a_cpu_and_replicas_count_at_their_minimum():
    for settings, there, message in (
        ({"stage": [{"num_cpus": 0.5}] * 3, "decode": {"num_cpus": 1.0}}, Available(2), "2.5 CPUs and there are 2"),
        ({"stage": [{"num_cpus": 0.25, "replicas": {"min": 4, "max": 8}}] * 3}, Available(2), "4 x 0.25"),
        ({"stage": [{"num_gpus": 1.0}] * 3}, Available(8, num_gpus=1), "3 GPUs and there is 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            allocate(load_config(overrides=settings).compute, there)


def test_parts_of_gpus_that_no_device_has_room_for_are_refused_to_further_models():
    parts = [ActorGroup((), 1, 1.0, 0.66, 3)]  # 1.98 in sum, and two never lie on one device
    with pytest.raises(ConfigError, match="the further models ask for 3 GPUs and there are 2"):
        beside_models(Available(8, num_gpus=2), parts)
    assert beside_models(Available(8, num_gpus=4), parts).num_gpus == 1
    assert beside_models(Available(8, num_gpus=4), [ActorGroup((), 1, 1.0, 0.5, 3)]).num_gpus == 2


def test_gpus_of_further_models_are_found_on_the_nodes_beside_those_of_the_stages():
    """A model on each of two nodes leaves no node with two GPUs, though two are left in sum."""
    nodes = (Node("a", 8, 2, "L4", node_id="id a"), Node("b", 8, 2, "L4", node_id="id b"))
    available, whole = Available(16, 4, nodes), [{"num_gpus": 2, "replicas": {"min": 1, "max": 1}}]
    config = load_config(overrides={"num_stages": 1, "stage": whole})
    small = [ActorGroup((), 1, 1.0, 1.0, 2)]
    left = beside_models(available, small)
    allocation = allocate(config.compute, left, models=model_resources(available, small))
    found = place_replicas(allocation, left.nodes)
    pinned = pin_replicas(config.stage, allocation, nodes, found)
    (of_stage,), of_models = pinned.stages[0].node_ids, pinned.models[0].node_ids
    assert len(of_models) == 2 and set(of_models) == {"id a", "id b"} - {of_stage}
    large = [ActorGroup((SimpleNamespace(name="tags"),), 1, 1.0, 2.0, 1)]
    narrow = replace(available, nodes=(nodes[0], *(Node(name, 8, 1, "L4") for name in "bc")))
    with pytest.raises(
        ConfigError, match=r"\[\[model\]\] tags .* no node has room for replica 1 of 1 next to the others"
    ):
        allocate(config.compute, beside_models(narrow, large), models=model_resources(narrow, large))


def test_cpus_of_further_models_on_gpus_are_found_on_the_nodes_of_their_gpus():
    """Of 64 CPUs the node with the GPUs has 4, on which a model of 4 CPUs leaves none to a stage."""
    nodes = (Node("cpu", 60, node_id="id cpu"), Node("gpu", 4, 2, "L4", node_id="id gpu"))
    available = Available(64, 2, nodes)
    for stage, num_cpus, fits in (
        ({"num_cpus": 1, "num_gpus": 1}, 4.0, False),
        ({"num_cpus": 1, "num_gpus": 1}, 3.0, True),
        ({"device": "cpu"}, 4.0, True),
    ):
        compute = load_config(overrides={"num_stages": 1, "stage": [stage]}).compute
        actors = [ActorGroup((SimpleNamespace(name="tags"),), 1, num_cpus, 1.0, 1)]
        left, models = beside_models(available, actors), model_resources(available, actors)
        if not fits:
            with pytest.raises(
                ConfigError, match=r"\[\[model\]\] tags .* no node has room .* num_cpus = 2 can be placed"
            ):
                allocate(compute, left, models=models)
            continue
        allocation = allocate(compute, left, models=models)
        *of_stages, of_model = place_replicas(allocation, left.nodes)
        on_gpu = num_cpus + sum(allocation.stages[0].num_cpus for number in of_stages[0] if number == 1)
        assert of_model == (1,) and on_gpu <= 4


@pytest.mark.parametrize("num_cpus", [1, 2, 4])
def test_the_defaults_fit_a_small_machine_with_a_further_model_on_its_gpu(num_cpus):
    there, actors = Available(num_cpus, 2, (Node("a", num_cpus, 2),)), [ActorGroup((), 1, 1.0, 1.0, 1)]
    left = beside_models(there, actors)
    allocation = allocate(load_config().compute, left, models=model_resources(there, actors))
    assert allocation.min_cpus <= left.num_cpus < num_cpus


def test_a_burst_of_parts_does_not_start_a_crowd_of_writers():
    found = [allocate(load_config().compute, Available(num_cpus)).num_writers for num_cpus in (1, 2, 8, 64)]
    assert found == [1, 1, 2, 16]


def test_the_object_store_grows_with_what_passes_and_has_bounds():
    small, usual, large = (object_store_bytes(per_row, 64 * 32) for per_row in (1_000, 400_000, 50_000_000))
    assert small == 512 << 20
    assert usual == 64 * 32 * 400_000
    assert large == 1 << 30


def test_three_stages_on_a_gpu_get_memory_for_blocks_of_activations(monkeypatch):
    """With 1 GiB, blocks of 256 activations of a ViT-L/14 crawled through them at a fifteenth of the GPU's rate."""
    model = Model("", Path(), MODELS["vit-l-14"](), None, "")
    plan = plan_shards(model.config, 3, dtype="bfloat16")
    found = []
    for gib in (2, 24, 128):
        monkeypatch.setattr(hardware, "memory_bytes", lambda gib=gib: gib << 30)
        found.append(ray_store_bytes("auto", model, plan, GPU_SETTINGS))
    assert found == [1 << 30, 6 << 30, 16 << 30]
    assert ray_store_bytes("auto", model, plan, GPU_SETTINGS, num_gpus=8) == 32 << 30, "as far as memory goes"


@pytest.mark.parametrize("num_cpus", [1, 2, 4, 16])
def test_stages_grown_to_their_maximum_leave_a_decode_task_its_cpu(num_cpus):
    stages = [{"replicas": {"min": 1, "max": 5}}, {}, {"replicas": {"min": 1, "max": 9}}]
    allocation = allocate(load_config(overrides={"stage": stages}).compute, Available(num_cpus))
    assert [stage.max_replicas for stage in allocation.stages] == [5, 1, 9], "small requests always fit"
    held = sum(stage.max_replicas * stage.num_cpus for stage in allocation.stages)
    assert held + allocation.decode_cpus <= num_cpus


def test_a_stage_grows_no_further_than_the_machine_allows():
    stages = [{"num_cpus": 0.5, "replicas": {"min": 1, "max": 8}}, {"num_cpus": 0.25}, {"num_cpus": 0.25}]
    config = load_config(overrides={"stage": stages, "decode": {"num_cpus": 1.0}})
    laptop, server = allocate(config.compute, Available(4)), allocate(config.compute, Available(64))
    assert [stage.max_replicas for stage in laptop.stages] == [5, 1, 1], "5 x 0.5 + 2 x 0.25 + 1 = 4"
    limits = describe_limits(config.stage, laptop)
    assert limits.startswith("the CPUs and GPUs let stage 0 to 5 replicas instead of 8 grow")
    assert [stage.max_replicas for stage in server.stages] == [8, 3, 3]
    assert describe_limits(config.stage, server) is None


@pytest.mark.parametrize("most", [7, 40, 10**6, 2**62])
@pytest.mark.parametrize(
    ("stages", "available"),
    [
        ([{}, {"num_cpus": 0.25}, {"num_cpus": 0.5}], Available(8)),
        ([{"num_gpus": 0.5, "num_cpus": 0.1}, {"num_gpus": 0.3, "num_cpus": 0.2}], Available(16, 3)),
        ([{"num_gpus": 1, "num_cpus": 1}, {"num_cpus": 1}], Available(8, 3, (Node("a", 4, 1), Node("b", 4, 2)))),
    ],
)
def test_stages_grow_as_far_as_if_they_gave_up_one_by_one_and_a_huge_limit_takes_no_time(stages, available, most):
    stages = [stage | {"replicas": {"min": 1, "max": most - number}} for number, stage in enumerate(stages)]
    config = load_config(overrides={"stage": stages, "num_stages": len(stages)})
    began_s = time.monotonic()
    found = allocate(config.compute, available)
    assert time.monotonic() - began_s < 5
    if most < 10**6:
        asked = request_resources(config.compute, available)
        assert found == one_by_one(asked, available)
    assert sum(stage.max_replicas * stage.num_cpus for stage in found.stages) + found.decode_cpus <= available.num_cpus


def one_by_one(allocation, available):
    """The largest stage gives up a replica at a time."""
    stages = list(allocation.stages)
    while lacking := resources._lacking(replace(allocation, stages=tuple(stages)), available):
        may = [index for index, stage in enumerate(stages) if stage.max_replicas > stage.min_replicas]
        may = [index for index in may if lacking == "node" or getattr(stages[index], lacking) > 0]
        index = max(may, key=lambda index: stages[index].max_replicas)
        stages[index] = replace(stages[index], max_replicas=stages[index].max_replicas - 1)
    return replace(allocation, stages=tuple(stages))


def test_gpus_limit_growth_too_and_stages_on_cpus_keep_their_replicas():
    on_cpu = {"device": "cpu", "replicas": {"min": 1, "max": 8}}
    half, whole = ({"num_gpus": num_gpus, "replicas": {"min": 1, "max": 4}} for num_gpus in (0.5, 1))
    for stages, expected in (([half, half], [2, 2]), ([on_cpu, whole], [8, 2])):
        config = load_config(overrides={"stage": stages, "num_stages": 2})
        allocation = allocate(config.compute, Available(64, num_gpus=2))
        assert [stage.max_replicas for stage in allocation.stages] == expected


def asked(num_gpus, *stages, **options):
    config = load_config(overrides={"stage": stages, "num_stages": len(stages), **options})
    return [(stage.num_gpus, stage.device) for stage in allocate(config.compute, Available(16, num_gpus)).stages]


def test_parts_that_add_up_but_share_no_device_are_refused_with_the_cure():
    with pytest.raises(
        ConfigError, match=r"1 x 0.66 \+ .* ask for 3 GPUs and there are 2: each part lies on one device"
    ):
        asked(2, *[{"num_gpus": 0.66}] * 3)
    assert asked(3, *[{"num_gpus": 0.66}] * 3) == [(0.66, "cuda")] * 3


def test_parts_that_fit_in_one_order_only_are_refused():
    stages = [{"num_gpus": num_gpus} for num_gpus in (0.6, 0.4, 0.5, 0.5)]
    with pytest.raises(ConfigError, match="ask for 3 GPUs and there are 2"):
        asked(2, *stages)
    assert len(asked(3, *stages)) == 4


def test_what_one_stage_asks_for_is_taken_from_what_the_others_share():
    assert asked(1, {"num_gpus": 0.5}, {}, {}) == [(0.5, "cuda"), (0.25, "cuda"), (0.25, "cuda")]
    assert asked(2, {"num_gpus": 0.66}, {}, {}) == [(0.66, "cuda"), (0.5, "cuda"), (0.5, "cuda")]
    assert asked(2, {"num_gpus": 2}, {}) == [(2, "cuda"), (0, "cpu")], "what is left is no GPU"


def test_stages_on_the_cpu_reserve_no_gpu_unless_they_say_so():
    assert asked(2, {}, {}, device="cpu") == [(0, "cpu")] * 2
    assert asked(2, {"num_gpus": 0.5}, {}, device="cpu") == [(0.5, "cpu"), (0, "cpu")]
    assert asked(1, {"device": "cpu"}, {}) == [(0, "cpu"), (1, "cuda")]
    assert asked(1, {"device": "cuda"}, {}, device="cpu") == [(1, "cuda"), (0, "cpu")]


def test_a_stage_that_must_have_a_gpu_and_finds_none_is_refused():
    with pytest.raises(ConfigError, match='stage 0: device = "cuda", and no GPU of 0 has room'):
        asked(0, {}, device="cuda")
    with pytest.raises(ConfigError, match="stage 1: .* no GPU of 1 has room .*lower num_gpus of other stages"):
        asked(1, {"num_gpus": 1}, {"device": "cuda"})


@pytest.mark.parametrize("num_gpus", [1.5, 2.25, 0.00005, -1])
def test_numbers_of_gpus_that_no_process_can_hold_are_refused(num_gpus):
    with pytest.raises(ConfigError, match="num_gpus"):
        load_config(overrides={"stage": [{"num_gpus": num_gpus}], "num_stages": 1})


def test_cuda_without_gpus_is_a_contradiction_wherever_the_device_is_said():
    for changes in ({"device": "cuda", "stage": [{"num_gpus": 0}]}, {"stage": [{"num_gpus": 0, "device": "cuda"}]}):
        with pytest.raises(ConfigError, match='stage 0: device = "cuda" with num_gpus = 0'):
            load_config(overrides={"num_stages": 1, **changes})


def test_a_run_says_what_its_stages_compute_on_where_there_are_gpus():
    config = load_config(overrides={"num_stages": 3})
    on_two = Available(8, num_gpus=2)
    assert describe_devices(allocate(config.compute, on_two), on_two) == (
        "2 GPUs: stage 0 on cuda (1 GPU), stage 1 on cuda (0.5 GPU), stage 2 on cuda (0.5 GPU)"
    )
    assert describe_devices(allocate(config.compute, Available(8)), Available(8)) is None


ONE = PlannedStage(ShardSpec(LayerRange(0, 1), LayerRange(0, 1)), 1, 1e6, 0.0, 0, 0)


def planned(*seconds, num_replicas=1):
    return [replace(ONE, seconds_per_item=each, num_replicas=num_replicas) for each in seconds]


def test_the_heaviest_gives_way_to_none_and_the_others_the_more_the_less_they_do():
    first, second, third = niceness_by_work(planned(1.0, 0.93, 0.8))
    assert first == 0 < second < third <= MAX_NICENESS
    halved = replace(ONE, seconds_per_item=2.0, num_replicas=2)
    for equal in ([ONE, ONE], planned(1.0, 1.01), [halved, *planned(1.0)]):
        assert niceness_by_work(equal) == (0, 0)
    for unequal in (planned(1.0, 1e-9), [ONE, replace(ONE, flops_per_image=0.0)]):
        assert niceness_by_work(unequal) == (0, MAX_NICENESS)
    assert niceness_by_work([replace(ONE, flops_per_caption=1e6), ONE]) == (0, MAX_NICENESS), "operations for seconds"


def test_nodes_are_not_added_up():
    """Two nodes of one GPU and one CPU hold no process of two; sums say that they do."""
    nodes = (Node("a", 2, 1), Node("b", 2, 1))
    two = Available(4, 2, nodes)
    with pytest.raises(ConfigError, match=r"stage 0 .*: no node has room.* has 1 GPU; num_gpus = 1 can be placed"):
        allocate(load_config(overrides={"stage": [{"num_gpus": 2}], "num_stages": 1}).compute, two)
    with pytest.raises(ConfigError, match=r"a decode or write task .*the nearest, . \(2 CPU, 1 x GPU\)"):
        allocate(load_config(overrides={"decode": {"num_cpus": 3}, "num_stages": 1}).compute, two)


def test_a_decode_task_and_the_threads_of_a_stage_fit_one_node():
    nodes = tuple(Node(f"node {number}", 1) for number in range(2))
    assert allocate(load_config().compute, Available(2, 0, nodes)).decode_cpus == 0.5
    hundred = tuple(Node(f"node {number}", 16) for number in range(100))
    (first, *_) = allocation = allocate(load_config().compute, Available(1600, 0, hundred)).stages
    assert [stage.min_replicas for stage in allocation] == [100] * 3, "a replica of each stage on every node"
    assert first.num_threads == 5
