"""What is decided of a run before it starts: sizes that fit into the object store of its Ray."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import samples
from embedding_runs import begun

from embedder.executors import job as job_module
from embedder.executors.job import describe_store_limit, handed_on_bytes, make_plan, plan_job
from embedder.models.model_folder import open_model
from embedder.placement.allocation import place_replicas
from embedder.placement.device_settings import GPU_SETTINGS
from embedder.placement.fleet import Available
from embedder.placement.placement import Node
from embedder.quantities import size_text
from embedder.servables.packing import ActorGroup

GIB = 1 << 30


@pytest.fixture
def planned(make_run, tmp_path):
    """The job of a run on one GPU whose Ray has so much memory for blocks."""

    source = samples.folder(tmp_path / "in")

    def plan(store_bytes, *, can_grow=False, **options):
        config = make_run(source, num_stages=3, device="auto", **options)
        model = open_model(config.model)
        there = Available(16, 1, (Node("a", 16, 1, "H100", object_store_bytes=store_bytes),), can_grow=can_grow)
        runs = [begun(config, model)]
        job = plan_job(config.compute, config.rows, model, make_plan(config.compute, model), there, runs, 10**6)
        return job, describe_store_limit(job, there)

    return plan


def test_a_gpu_run_on_a_large_object_store_has_its_usual_sizes(planned):
    for store_bytes, can_grow in ((0, False), (16 * GIB, False), (8 << 20, True)):
        job, line = planned(store_bytes, can_grow=can_grow)
        assert {stage.device for stage in job.stages} == {"cuda"}
        assert (job.settings, line) == (GPU_SETTINGS, None)
        assert job.decode.rows_per_batch == 256


def test_decoding_and_stages_make_smaller_batches_for_a_small_object_store_and_a_line_says_so(planned):
    job, line = planned(8 << 20, ray_address="10.0.0.1:6379")
    row = max(handed_on_bytes(job.model, job.plan, job.decode))
    num_rows = job.decode.rows_per_batch
    assert num_rows < 256 and num_rows * row <= job.settings.max_block_bytes == (8 << 20) // 2 // 5 // 4
    assert {stage.batch_sizes for stage in job.stages} == {job.settings.batch_sizes}
    assert line == (
        f"Ray's object store of 8.0 MiB has room for blocks of 205 KiB instead of 160.0 MiB and batches of {num_rows} "
        "rows instead of 256; 6.3 GiB would do (ray start --object-store-memory)"
    )


def test_a_batch_size_of_the_users_own_stays_and_the_line_says_what_it_costs(planned):
    job, line = planned(8 << 20, batch_size=256)
    assert {stage.batch_sizes for stage in job.stages} == {(256,)}
    assert job.decode.rows_per_batch == 256
    block = size_text(256 * max(handed_on_bytes(job.model, job.plan, job.decode)))
    assert f"instead of 160.0 MiB, and batch_size = 256 makes them {block}: steps will wait for each other; " in line
    assert line.endswith("6.3 GiB would do (a Ray that a run starts takes a quarter of the machine's memory at most)")


@pytest.fixture
def beside_actors(make_run, tmp_path, monkeypatch):
    """Decide a run of a large model next to actors of further models, for nodes."""

    def decide(actors, *nodes):
        config = make_run(samples.folder(tmp_path / "in"), num_stages=3, device="auto")
        model, groups = open_model(config.model), tuple(SimpleNamespace(actor=actor) for actor in actors)
        vision = {"image_size": 224, "width": 1024, "depth": 24, "num_heads": 16}
        vision = model.config.required_vision.model_copy(update=vision)
        model = replace(model, config=model.config.model_copy(update={"vision": vision}))
        monkeypatch.setattr(job_module, "group_models", lambda models, shared: groups)
        there = Available(sum(node.num_cpus for node in nodes), sum(node.num_gpus for node in nodes), nodes)
        runs = [begun(config, model)]
        return plan_job(config.compute, config.rows, model, make_plan(config.compute, model), there, runs, 10**6)

    return decide


@pytest.mark.parametrize("num_gpus", [2, 3, 8])
def test_the_main_model_is_cut_for_the_gpus_that_further_models_leave(beside_actors, num_gpus):
    job = beside_actors([ActorGroup((), 1, 1.0, 1.0, 1)], Node("a", 16, num_gpus, "H100"))
    assert {stage.device for stage in job.stages} == {"cuda"}
    assert job.allocation.min_gpus == num_gpus - 1
    assert [(each.replicas, each.num_gpus) for each in job.allocation.models] == [(1, 1.0)]


@pytest.mark.parametrize("parts", [(2.0,), (1.0, 0.5, 0.5)])
def test_the_main_model_is_cut_for_the_nodes_that_further_models_leave(beside_actors, parts):
    """Two GPUs are left in sum; with a stage on one of each type, no node would have two for a further model."""
    nodes = (Node("a", 8, 2, "A100", node_id="id a"), Node("b", 8, 2, "L4", node_id="id b"))
    actors = [ActorGroup((SimpleNamespace(name=f"tags of {part}"),), 1, 1.0, part, 1) for part in parts]
    job = beside_actors(actors, *nodes)
    assert {stage.device for stage in job.stages} == {"cuda"} and job.allocation.min_gpus == 2
    assert place_replicas(job.allocation, nodes) is not None
