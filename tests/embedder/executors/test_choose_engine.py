import re
from dataclasses import replace
from pathlib import Path

import pytest
import samples

import embedder
from embedder.config import load_config
from embedder.executors.choose_engine import RunTimes, choose_engine
from shards.model_config import load_model_config
from shards.plan import plan_shards

DEMO_MODEL = Path(embedder.__file__).with_name("demo_model")


@pytest.fixture(scope="module")
def plan():
    return plan_shards(load_model_config(DEMO_MODEL), 3)


def chosen(plan, num_items, num_cpus, num_gpus=0, **options):
    return choose_engine(load_config(overrides=options).compute, plan, num_items, num_cpus, num_gpus).engine


def test_few_cores_are_kept_busy_by_one_process(plan):
    assert {chosen(plan, num_items, 2) for num_items in (1, 1_000, 1_000_000)} == {"local"}


def test_many_cores_would_wait_for_one_decoder(plan):
    assert chosen(plan, 100, 64) == "local", "Ray's start would take longer"
    assert chosen(plan, 100_000, 64) == "ray"


def test_what_asks_for_ray_gets_it(plan):
    assert chosen(plan, 1, 2, engine="ray") == "ray"
    assert chosen(plan, 1, 2, ray_address="10.0.0.1:6379") == "ray"
    assert chosen(plan, 1, 2, num_stages=1, stage=[{"replicas": {"min": 1, "max": 2}}]) == "ray"
    assert chosen(plan, 100_000, 64, engine="local") == "local"


def test_gpus_are_used_where_they_are_faster_than_the_start_of_ray_is_long():
    large = plan_shards(load_model_config(DEMO_MODEL), 3)
    large = replace(large, stages=tuple(replace(stage, flops_per_image=1e10) for stage in large.stages))
    assert [chosen(large, num_items, 4) for num_items in (10, 1_000)] == ["local", "local"]
    assert [chosen(large, num_items, 4, num_gpus=1) for num_items in (10, 1_000)] == ["local", "ray"]
    assert chosen(large, 1_000, 4, num_gpus=1, device="cpu") == "local"


def test_a_gpu_of_a_known_type_counts_as_fast_as_it_is(plan):
    large = replace(plan, stages=tuple(replace(stage, flops_per_image=5e10) for stage in plan.stages))
    config = load_config(overrides={"dtype": "bfloat16"})
    types = (("NVIDIA H200",), ("L4", "H100"), ())
    choices = [choose_engine(config.compute, large, 12_000, 16, 1, gpus=gpus) for gpus in types]
    assert [choice.engine for choice in choices] == ["ray"] * 3
    times = [re.search(r"and (.*) on Ray with 1 GPU", choice.reason)[1] for choice in choices]
    assert times == ["16 s", "52 s", "7 min"]


def test_a_slow_dtype_of_the_cpu_counts_as_slow(plan):
    large = replace(plan, stages=tuple(replace(stage, flops_per_image=1e9) for stage in plan.stages))
    config = load_config(overrides={"dtype": "bfloat16"})
    found = [choose_engine(config.compute, large, 400, 4, num_gpus=1, has_bf16=each).engine for each in (True, False)]
    assert found == ["local", "ray"]


def test_float16_goes_to_the_gpus_however_few_items_there_are(plan):
    assert [chosen(plan, 1, 4, num_gpus=number, dtype="float16") for number in (1, 0)] == ["ray", "local"]
    assert chosen(plan, 1, 4, num_gpus=1, dtype="float16", device="cpu") == "local"
    assert chosen(plan, 1, 4, num_gpus=1, dtype="bfloat16") == "local"


def test_a_device_that_only_ray_lends_decides(plan):
    assert chosen(plan, 1, 2, device="cuda") == "ray"
    assert chosen(plan, 1, 2, num_stages=1, stage=[{"device": "cuda"}]) == "ray"
    on_gpus = replace(plan, stages=tuple(replace(stage, num_gpus=0.5) for stage in plan.stages))
    assert chosen(on_gpus, 1, 2) == "ray"
    assert chosen(on_gpus, 1, 2, device="cpu") == "local"


def test_the_local_engine_refuses_a_gpu_before_it_writes_anything(tiny_model, tmp_path, run_embedder):
    source = samples.folder(tmp_path / "in", num_images=1)
    arguments = ["--model", tiny_model, "--store", tmp_path / "store", "--engine", "local", "--device", "cuda"]
    code, _, stderr = run_embedder("embed", source, *arguments)
    assert code == 2
    assert 'stage 0: device = "cuda", and no GPU of 0 has room' in stderr and 'engine = "ray"' in stderr
    assert not (tmp_path / "store" / "runs").exists()


def test_times_of_earlier_runs_count_before_what_costs_expect(plan):
    config = load_config(overrides={"model": "m"})
    slow = {"local": RunTimes(startup_s=9.0, items_per_s=0.1, num_items=40, publish_s=1.0)}
    found = choose_engine(config.compute, plan, 100, 2, measured=slow)
    assert found.engine == "ray"
    assert "100 items would take about 17 min in one process" in found.reason
    assert found.reason.endswith("; the time in one process is from earlier runs here")
    assert choose_engine(config.compute, plan, 1, 2).reason.startswith("1 item would take about 5 s in one process")
