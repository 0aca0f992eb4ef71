"""Requests that would hang for ever are refused; defaults always fit."""

import pytest

from embedder.config import load_config
from embedder.errors import ConfigError
from embedder.run.resources import Available, allocate, describe_limits, object_store_bytes


@pytest.mark.parametrize("num_cpus", [1, 2, 3, 4, 8, 16, 96])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 6])
def test_the_defaults_fit_every_machine(num_cpus, num_stages):
    allocation = allocate(load_config(overrides={"num_stages": num_stages}), Available(num_cpus))
    assert allocation.min_cpus <= num_cpus
    assert allocation.decode_cpus > 0


def test_a_gpu_is_shared_by_the_stages_in_equal_parts():
    allocation = allocate(load_config(), Available(8, num_gpus=1))
    assert [stage.num_gpus for stage in allocation.stages] == [0.33] * 3
    assert {stage.device for stage in allocation.stages} == {"cuda"}


def test_each_stage_gets_a_gpu_where_there_are_enough():
    allocation = allocate(load_config(), Available(32, num_gpus=4))
    assert [stage.num_gpus for stage in allocation.stages] == [1.0] * 3


def test_decode_needs_a_cpu_beside_the_actors():
    config = load_config(overrides={"stage": [{"num_cpus": 0.5}] * 3, "decode": {"num_cpus": 1.0}})
    with pytest.raises(ConfigError, match="2.5 CPUs and there are 2"):
        allocate(config, Available(2))


def test_replicas_count_at_their_minimum():
    stages = [{"num_cpus": 0.25, "replicas": {"min": 4, "max": 8}}] * 3
    with pytest.raises(ConfigError, match="4 x 0.25"):
        allocate(load_config(overrides={"stage": stages}), Available(2))


def test_gpus_that_do_not_exist_are_refused():
    with pytest.raises(ConfigError, match="3 GPUs and there are 1"):
        allocate(load_config(overrides={"stage": [{"num_gpus": 1.0}] * 3}), Available(8, num_gpus=1))


def test_a_burst_of_parts_does_not_start_a_crowd_of_writers():
    assert [allocate(load_config(), Available(num_cpus)).num_writers for num_cpus in (1, 2, 8, 64)] == [1, 1, 2, 16]


def test_the_object_store_grows_with_what_passes_and_has_bounds():
    small, usual, large = (object_store_bytes(per_row, 32) for per_row in (1_000, 400_000, 50_000_000))
    assert small == 512 << 20
    assert usual == 64 * 32 * 400_000
    assert large == 1 << 30


@pytest.mark.parametrize("num_cpus", [1, 2, 4, 16])
def test_stages_grown_to_their_maximum_leave_a_decode_task_its_cpu(num_cpus):
    stages = [{"replicas": {"min": 1, "max": 5}}, {}, {"replicas": {"min": 1, "max": 9}}]
    allocation = allocate(load_config(overrides={"stage": stages}), Available(num_cpus))
    assert [stage.max_replicas for stage in allocation.stages] == [5, 1, 9], "small requests always fit"
    held = sum(stage.max_replicas * stage.num_cpus for stage in allocation.stages)
    assert held + allocation.decode_cpus <= num_cpus


def test_a_stage_grows_no_further_than_the_machine_allows():
    stages = [{"num_cpus": 0.5, "replicas": {"min": 1, "max": 8}}, {"num_cpus": 0.25}, {"num_cpus": 0.25}]
    config = load_config(overrides={"stage": stages, "decode": {"num_cpus": 1.0}})
    laptop, server = allocate(config, Available(4)), allocate(config, Available(64))
    assert [stage.max_replicas for stage in laptop.stages] == [5, 1, 1], "5 x 0.5 + 2 x 0.25 + 1 = 4"
    assert describe_limits(config, laptop).startswith("the CPUs and GPUs let stage 0 to 5 instead of 8 replicas grow")
    assert [stage.max_replicas for stage in server.stages] == [8, 1, 1]
    assert describe_limits(config, server) is None


def test_gpus_limit_growth_too():
    stages = [{"num_gpus": 0.5, "replicas": {"min": 1, "max": 4}}] * 2
    allocation = allocate(load_config(overrides={"stage": stages, "num_stages": 2}), Available(64, num_gpus=2))
    assert [stage.max_replicas for stage in allocation.stages] == [2, 2]
