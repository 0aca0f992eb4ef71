"""The pipeline on a real Ray: its plan, its results, its bounds."""

import re
import subprocess
import sys
from dataclasses import fields, replace

import numpy as np
import pyarrow as pa
import pytest
import samples
from embedding_runs import begun, embedded
from library_versions import is_older
from ray.data import DataContext

import embedder
from embedder.encoders.query_encoder import QueryEncoder
from embedder.errors import ConfigError, RunFailedError
from embedder.executors.datasink import PartSink
from embedder.executors.job import make_plan, plan_job
from embedder.executors.ray_session import ray_session
from embedder.models.model_folder import open_model
from embedder.pipeline import embed_on_ray, embedding_graph
from embedder.placement.fleet import Available
from embedder.sources.listing import list_sources


def planned(config, num_cpus=2, num_gpus=0):
    """A job for so many CPUs and GPUs, and its listing."""
    model = open_model(config.model)
    plan, runs = make_plan(config.compute, model), [begun(config, model)]
    job = plan_job(config.compute, config.rows, model, plan, Available(num_cpus, num_gpus), runs)
    return job, list_sources(config.source)


def operators_of(graph):
    """The physical operators of a dataset, the first one first."""
    from ray.data._internal.logical.optimizers import get_execution_plan

    plan = get_execution_plan(graph._logical_plan)
    operator, found = (plan[0] if isinstance(plan, tuple) else plan).dag, []  # with its rules, from Ray 2.56 on
    while operator is not None:
        found.append(operator)
        operator = operator.input_dependencies[0] if operator.input_dependencies else None
    return found[::-1]


def test_the_physical_plan_has_decode_tasks_and_three_separate_actor_pools(make_run, tmp_path, ray_cluster):
    job, listing = planned(make_run(samples.folder(tmp_path / "in")))
    operators = operators_of(embedding_graph(listing, job))
    kinds = [type(operator).__name__ for operator in operators]
    assert kinds == ["InputDataBuffer", "TaskPoolMapOperator", *["ActorPoolMapOperator"] * 3]
    names = [operator.name for operator in operators]
    assert re.search("decode", names[1])
    assert all(re.search("Stage", name) and not re.search("decode", name) for name in names[2:])


@pytest.mark.skipif(
    is_older("ray", "2.59"), reason="Ray before 2.59 bounds no pool, and gives an actor one call at a time"
)
def test_the_physical_plan_reserves_gpus_and_hands_blocks_on_whole(make_run, tmp_path, ray_cluster):
    growing = {"replicas": {"min": 1, "max": 9}}
    job, listing = planned(make_run(samples.folder(tmp_path / "in"), stage=[{}, {}, growing]), num_cpus=16, num_gpus=2)
    assert [spec.device for spec in job.stages] == ["cuda"] * 3
    assert [spec.gpu_share for spec in job.stages] == [1.0, 0.5, 0.5]
    _, decode, *pools = operators_of(embedding_graph(listing, job))
    assert re.search("decode", decode.name)
    assert all(re.search("Stage", pool.name) and not re.search("decode", pool.name) for pool in pools)
    assert [pool._ray_remote_args["num_gpus"] for pool in pools] == [1.0, 0.5, 0.5]
    # What Ray Data counts with when it lets pools grow.
    assert [pool.min_scheduling_resources().gpu for pool in pools] == [1.0, 0.5, 0.5]
    least, most = zip(*[pool.min_max_resource_requirements() for pool in pools], strict=True)
    assert (sum(each.gpu for each in least), sum(each.gpu for each in most)) == (2, 2)
    assert all(pool._min_rows_per_bundle is None for pool in pools), "or Ray would merge blocks"
    assert [pool._actor_pool.max_actor_concurrency() for pool in pools] == [3, 3, 3], "copies overlap computation"
    on_cpus, listing = planned(make_run(samples.folder(tmp_path / "other"), stage=[{}, {}, growing]), num_cpus=16)
    _, _, *pools = operators_of(embedding_graph(listing, on_cpus))
    assert [pool._actor_pool.max_actor_concurrency() for pool in pools] == [1, 1, 1]


def test_ray_and_the_local_engine_make_the_same_rows(make_run, tmp_path, ray_cluster):
    source = samples.folder(tmp_path / "in", num_images=70, num_clips=2)
    (source / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    options = {"max_reject_fraction": 0.1, "segment_s": 2.0, "rows_per_part": 16}
    _, local = embedded(make_run(source, store=str(tmp_path / "local"), **options))
    report, on_ray = embedded(make_run(source, engine="ray", **options))
    assert report.engine == "ray"
    assert (report.num_items, report.num_rejected) == (73, 1)
    assert local.keys() == on_ray.keys()
    differing = {"run_id", "embedded_at", "image_embedding", "text_embedding"}
    for key, row in local.items():
        other = on_ray[key]
        assert {name: row[name] for name in row.keys() - differing} == {
            name: other[name] for name in row.keys() - differing
        }
        for name in ("image_embedding", "text_embedding"):
            assert (row[name] is None) == (other[name] is None)
            assert row[name] is None or np.allclose(row[name], other[name], atol=1e-6)
    assert {step.step for step in report.steps} == {"decode", "stage 0", "stage 1", "stage 2", "write"}
    assert all(step.num_rows == 75 for step in report.steps), "each step saw each row once, rejects and segments too"
    assert all(0 < step.wall_share < 1 for step in report.steps)
    review = report.review
    assert review.images_per_item == pytest.approx((70 + 2 * 2 * 4) / 73), "two segments a clip, four frames each"
    assert review.captions_per_item == pytest.approx(35 / 73)
    assert {"decode", "stage 0", "stage 1", "stage 2", "write"} <= review.observed_seconds_per_item.keys()
    assert (review.expected, review.better) == (None, None), "nobody has measured this model here"
    assert [load.stage for load in report.loads] == [0, 1, 2]
    assert len({load.pid for load in report.loads}) == 3, "a process each"
    # Stages start together: the last one begins to load before the first one is done.
    assert max(load.started_s for load in report.loads) < min(load.started_s + load.wall_s for load in report.loads)


@pytest.mark.slow
def test_activations_stay_raw_bytes_and_never_become_pickled_objects(make_run, tmp_path, ray_cluster):
    job, listing = planned(make_run(samples.folder(tmp_path / "in", num_images=3), num_stages=2, dtype="bfloat16"))
    first_only = replace(job.allocation, stages=job.allocation.stages[:1])
    graph = embedding_graph(listing, replace(job, stages=job.stages[:1], allocation=first_only))
    blocks = graph.iter_batches(batch_format="pyarrow", batch_size=None)
    table = pa.concat_tables(blocks)
    vision, num_bytes = job.model.config.vision, 2
    assert table.schema.field("image_activation").type == pa.large_binary()
    sizes = {len(value) for value in table["image_activation"].to_pylist()}
    assert sizes == {vision.num_tokens * vision.width * num_bytes}
    assert table["text_activation"].null_count == 1, "the picture without a caption costs nothing there"


def test_a_sink_gathers_rows_before_it_writes(make_run, tmp_path):
    job, _ = planned(make_run(samples.folder(tmp_path / "in")))
    assert PartSink(job.parts, rows_per_part=300).min_rows_per_write == 300


@pytest.mark.slow
def test_a_dataset_gets_two_columns_and_keeps_the_others_untouched(tiny_model, ray_cluster):
    rows = [
        {"image": samples.image_bytes(1), "caption": "a red car", "sku": 7, "pixels": "mine", "error": None},
        {"image": samples.image_bytes(2), "caption": None, "sku": 8, "pixels": None, "error": "mine too"},
        {"image": b"no picture", "caption": "a blue bird", "sku": 9, "pixels": "x", "error": None},
    ]
    dataset = ray_cluster.data.from_items(rows)
    predictor = embedder.BatchPredictor.from_model(tiny_model)
    found = {row["sku"]: row for row in predictor.predict(dataset).take_all()}
    assert [{name: found[row["sku"]][name] for name in row} for row in rows] == rows
    encoder_rows = {7: (True, True), 8: (True, False), 9: (False, True)}
    for sku, sides in encoder_rows.items():
        assert (found[sku]["image_embedding"] is not None, found[sku]["text_embedding"] is not None) == sides
    assert found[7]["embedding_error"] is None
    assert "NotAPicture" in found[9]["embedding_error"]
    assert np.linalg.norm(found[7]["image_embedding"]) == pytest.approx(1, abs=1e-5)


@pytest.mark.slow
def test_arrays_of_pixels_are_taken_as_pictures(tiny_model, ray_cluster):
    pixels = np.stack([np.asarray(samples.make_image(seed)) for seed in range(3)])
    dataset = ray_cluster.data.from_numpy(pixels).rename_columns({"data": "image"})
    predictor = embedder.BatchPredictor.from_model(tiny_model, num_stages=1)
    found = sorted(list(row["image_embedding"]) for row in predictor.predict(dataset).take_all())
    files = QueryEncoder(open_model(str(tiny_model))).encode_image([samples.image_bytes(seed) for seed in range(3)])
    assert np.allclose(found, sorted(files.tolist()), atol=1e-6)


def test_more_replicas_than_cpus_are_refused_before_anything_starts(make_run, tmp_path, ray_cluster):
    stages = [{"num_cpus": 1.0}] * 3
    config = make_run(samples.folder(tmp_path / "in"), engine="ray", stage=stages)
    with pytest.raises(ConfigError, match=r"ask for 4 CPUs and there are 2.*lower stage.num_cpus"):
        embedded(config)


@pytest.mark.medium
@pytest.mark.skipif(
    "execution_no_progress_timeout_s" not in {field.name for field in fields(DataContext)}, reason="before Ray 2.58"
)
def test_a_run_without_progress_ends_and_says_what_to_do(make_run, tmp_path, ray_cluster):
    job, listing = planned(make_run(samples.folder(tmp_path / "in", num_images=2), num_stages=1))
    stuck = replace(job, allocation=replace(job.allocation, decode_cpus=64.0))  # as if the cluster had shrunk
    with ray_session(None, no_progress_timeout_s=3), pytest.raises(RunFailedError, match="the same command continues"):
        embed_on_ray(listing, stuck)


@pytest.mark.medium
@pytest.mark.parametrize("module", ["embedder.pipeline", "embedder.executors.datasink", "embedder.steps.decode"])
def test_the_driver_and_the_processes_of_tasks_load_no_model_library(module):
    program = f"import sys, {module}; print(sorted({{'torch', 'timm', 'transformers', 'faiss'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
