"""A finished run against its plan: throughput by the narrowest place, and a better cut where the data has drifted."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import samples
from embedding_runs import begun

from embedder.batch_schema import Measurement
from embedder.cli.render_report import (
    blame_lines,
    clip_lines,
    gpu_time_lines,
    idle_line,
    largest_wait,
    replicas_over_time,
    report_parts,
    review_parts,
)
from embedder.executors.job import make_plan, plan_job
from embedder.models.model_folder import open_model
from embedder.placement.fleet import Available
from embedder.placement.placement import Node
from embedder.report.plan_review import Host, StageShape, predict, problem_of, review_run
from embedder.report.report_schema import Expected, PlaceReport, Report, Review, StepReport
from embedder.report.step_sums import join_measurements, step_reports
from shards.plan import ShardPlan, plan_specs
from shards.planning.planning_costs import ENGINE_CALL_S, CallSizes, DataMix, HostCosts, ModelCosts, TowerSeconds
from shards.ranges import LayerRange
from shards.shard_specs import ShardSpec

# An image's layer takes 10 ms and a caption's 2 ms, and all else nothing, so that sums are easy to see.
COSTS = ModelCosts(
    model_fingerprint=None,
    device="cpu x1",
    dtype="float32",
    source="measured",
    caption_tokens=16,
    vision=TowerSeconds(0.0, 0.010, 0.0),
    text=TowerSeconds(0.0, 0.002, 0.0),
    send_s_per_byte=0.0,
    call_s=0.0,
    workspace_bytes_per_image=0,
    workspace_bytes_per_caption=0,
)
HOST = HostCosts(0.002, 0.001, 0.0005, 0.0005, 15.0, "measured")
CORES = Host(num_cores=16, num_decoders=4)


def spec(vision, text):
    return ShardSpec(LayerRange(*vision), LayerRange(*text))


PAIRS = DataMix()
CUT = (spec((0, 2), (0, 1)), spec((2, 4), (1, 4)))  # of 4 + 4 layers: 22 and 26 ms for a pair


@pytest.fixture
def model(tiny_model):
    return open_model(str(tiny_model))


def predicted(model, host=CORES, mix=PAIRS, costs=COSTS, **changes):
    shapes = [StageShape(each, **changes) for each in CUT]
    return predict(problem_of(model.config, "float32", costs, HOST, mix, rows_per_batch=32), shapes, host)


def test_the_slowest_stage_limits_a_run_with_cores_to_spare(model):
    found = predicted(model)
    assert found.stage_s == (pytest.approx(0.022), pytest.approx(0.026))
    assert (found.bottleneck, found.items_per_s) == ("stage 1", pytest.approx(1 / 0.026))
    assert predicted(model, num_replicas=3).items_per_s == pytest.approx(3 / 0.026)


def test_stages_on_parts_of_a_gpu_share_its_time(model):
    both = 0.022 + 0.026
    for num_gpus in (0.25, 0.5):
        found = predicted(model, num_gpus=num_gpus, num_threads=0)
        assert found.items_per_s == pytest.approx(1 / both), "each takes what the other leaves"
    assert predicted(model, num_gpus=0.5, num_replicas=2, num_threads=0).items_per_s == pytest.approx(2 / both)
    assert predicted(model, num_gpus=1.0, num_threads=0).items_per_s == pytest.approx(1 / 0.026)


def test_shared_cores_limit_a_run_by_all_that_needs_them(model):
    found = predicted(model, replace(CORES, num_cores=2), num_replicas=9)
    assert found.cpu_s == pytest.approx(0.022 + 0.026 + 0.002 + 0.001 + 0.0005 + 0.0005)
    assert (found.bottleneck, found.items_per_s) == ("shared cores", pytest.approx(2 / found.cpu_s))
    assert predicted(model, num_threads=0).cpu_s == pytest.approx(0.004), "stages on GPUs take no cores"


def test_decoding_limits_a_run_on_fast_devices(model):
    fast = replace(COSTS, vision=TowerSeconds(0, 1e-6, 0), text=TowerSeconds(0, 1e-6, 0))
    found = predicted(model, costs=fast)
    assert (found.bottleneck, found.items_per_s) == ("decode", pytest.approx(4 / 0.003))


def test_rays_driver_limits_a_run_of_small_blocks(model):
    fast, shapes = replace(COSTS, vision=TowerSeconds(0, 1e-6, 0), text=TowerSeconds(0, 1e-6, 0)), map(StageShape, CUT)
    problem = problem_of(model.config, "float32", fast, HOST, PAIRS, rows_per_batch=32, calls=CallSizes(8, 8, part=32))
    found = predict(problem, list(shapes), CORES)
    expected = 1 / (ENGINE_CALL_S * (3 / 8 + 1 / 32))
    assert (found.bottleneck, found.items_per_s) == ("Ray's driver", pytest.approx(expected))


def test_hand_overs_and_calls_are_part_of_a_stage(model):
    costs = replace(COSTS, send_s_per_byte=1e-6, call_s=0.32)
    vision = model.config.vision
    passing = 3 * vision.image_size**2 + vision.num_tokens * vision.width * 4
    passing += 16 * 4 + 16 * model.config.text.hidden_size * 4
    assert predicted(model, costs=costs).stage_s[0] == pytest.approx(0.022 + passing * 0.5e-6 + 0.01)


def finished_job(make_run, model, source, cut=CUT):
    """A job of two stages on 16 cores, as if it had run."""
    plan = plan_specs(model.config, cut, model_fingerprint=model.fingerprint)
    path = source / "plan.json"
    path.write_text(plan.to_json())
    config = make_run(source, num_stages=2, plan=str(path), engine="ray", stage=[{"num_threads": 1}] * 2)
    plan = make_plan(config.compute, model)
    return plan_job(config.compute, config.rows, model, plan, Available(16), [begun(config, model)])


def observed(stage_s, num_images, num_captions, num_items=100):
    """What such a run would have measured."""
    sums = {"num_calls": 4, "num_rows": num_items, "wall_share": 1, "cpu_share": 1}
    zeros = {"bytes_out": 0, "bytes_per_row": 0, "peak_rss_bytes": 0}
    steps = [
        StepReport(step=name, wall_s=9e9, cpu_s=seconds * num_items, **sums, **zeros)
        for name, seconds in {"decode": 0.003, "stage 0": stage_s[0], "stage 1": stage_s[1], "write": 0.0005}.items()
    ]
    counts = {"num_images": num_images, "num_captions": num_captions, "num_tokens": 16 * num_captions}
    return steps, [Measurement("decode", **counts)], num_items, 0.05  # CPU seconds of Ray


@pytest.mark.parametrize(
    ("num_cores", "seen", "bottleneck", "gain"),
    [
        (16, observed((0.023, 0.027), 100, 100), "stage 1", None),  # the planned mix
        (1, observed((0.002, 0.006), 0, 100), "shared cores", None),  # which no cut changes
        (16, observed((0.2, 0.6), 0, 100), "stage 1", 1.5),  # costs of another machine: only the level is off, by 100
    ],
)
def test_a_run_keeps_its_plan_where_another_cut_gains_nothing(
    make_run, model, tmp_path, num_cores, seen, bottleneck, gain
):
    job = finished_job(make_run, model, samples.folder(tmp_path / "in", 2))
    review = review_run(job, Available(num_cores), *seen, (COSTS, HOST))
    assert review.expected.bottleneck == bottleneck
    assert (review.better and review.better.gain) == (gain and pytest.approx(gain))
    assert Path(job.run.files.uri(f"runs/{job.run.run_id}/better_plan.json")).exists() == bool(gain)


def test_what_was_expected_and_seen_is_told_by_step(make_run, model, tmp_path):
    job = finished_job(make_run, model, samples.folder(tmp_path / "in", 2))
    review = review_run(job, Available(16), *observed((0.023, 0.027), 100, 100), (COSTS, HOST))
    assert review.expected.items_per_s == pytest.approx(1 / 0.026)
    assert review.observed_seconds_per_item["stage 1"] == pytest.approx(0.027)
    assert review.observed_seconds_per_item["engine"] == pytest.approx(0.0005)


def test_captions_in_place_of_pictures_ask_for_another_cut(make_run, model, tmp_path):
    job = finished_job(make_run, model, samples.folder(tmp_path / "in", 2))
    review = review_run(job, Available(16), *observed((0.002, 0.006), 0, 100), (COSTS, HOST))
    assert (review.images_per_item, review.captions_per_item, review.caption_tokens) == (0.0, 1.0, 16)
    assert review.better.gain == pytest.approx(6 / 4), "two and two layers of text instead of one and three"
    plan = ShardPlan.from_json(Path(review.better.path).read_text())
    assert [len(stage.spec.text) for stage in plan.stages] == [2, 2]
    shown = [part for part in review_parts(review, 120.0) if isinstance(part, str)]
    assert "a better cut for this data, predicted 1.50 times as fast" in shown[-1]
    assert f"--plan {review.better.path}" in shown[-1]


def test_a_run_that_was_too_short_asks_for_no_other_cut(make_run, model, tmp_path):
    job = finished_job(make_run, model, samples.folder(tmp_path / "in", 2))
    review = review_run(job, Available(16), *observed((0.002, 0.006), 0, 100), (COSTS, HOST), "3 s and 2 blocks")
    assert (review.better, review.too_short) == (None, "3 s and 2 blocks")
    assert review_parts(review, 36.0) == ["too short to judge its plan: 3 s and 2 blocks"]
    assert not Path(job.run.files.uri(f"runs/{job.run.run_id}/better_plan.json")).exists()


def test_without_costs_a_run_says_what_it_saw(make_run, model, tmp_path):
    job = finished_job(make_run, model, samples.folder(tmp_path / "in", 2))
    review = review_run(job, Available(16), *observed((0.02, 0.02), 100, 0), None)
    assert (review.expected, review.better, review.captions_per_item) == (None, None, 0.0)
    assert review_run(job, Available(16), *observed((1, 1), 0, 0, num_items=0), None) is None


def test_a_run_on_gpus_that_was_never_measured_is_judged_by_the_table(make_run, model, tmp_path):
    job = finished_job(make_run, model, samples.folder(tmp_path / "in", 2))
    stages = tuple(replace(stage, device="cuda") for stage in job.stages)
    job = replace(job, stages=stages, compute=replace(job.compute, dtype="bfloat16"))
    seen = observed((0.02, 0.02), 100, 100)

    def expected(*types, job=job):
        nodes = tuple(Node(name, 8, 1, gpu_type=name) for name in types)
        return review_run(job, Available(16, len(nodes), nodes), *seen, None)

    review = expected("H100", "H100")
    assert review.expected.source == "estimated" and review.better is None
    assert "less than half of what was expected was reached: stage " in review_parts(review, 25.0)[-1]
    compiled = expected("H100", job=replace(job, stages=tuple(replace(stage, compile=True) for stage in stages)))
    assert compiled.expected.items_per_s > review.expected.items_per_s
    small = expected("H100", job=replace(job, compute=replace(job.compute, items_per_task=2)))
    assert small.expected.bottleneck == "Ray's driver" != review.expected.bottleneck
    assert small.expected.items_per_s == pytest.approx(1 / (ENGINE_CALL_S * (3 / 2 + 1 / job.compute.rows_per_part)))
    assert [expected(*types).expected for types in (("H100", "T4"), ("B9000",), ())] == [None, None, None]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ((), ""),
        (((0.0, 1), (9.0, 0)), ""),
        (((0.0, 1), (5.2, 2), (8.0, 3), (9.0, 2), (9.1, 1), (9.2, 0)), "1 > 2 at 5 s > 3 at 8 s"),
        (((0.0, 2), (9.0, 1), (9.1, 0)), "2"),
        (((0.0, 1), (5.0, 2), (20.0, 1), (30.0, 2), (31.0, 1), (31.5, 0)), "1 > 2 at 5 s > 1 at 20 s > 2 at 30 s"),
    ],
)
def test_growth_is_shown_in_a_line(line, shown):
    numbers = {"num_calls": 1, "num_rows": 1, "wall_s": 1, "cpu_s": 1, "wall_share": 1, "cpu_share": 1}
    zeros = {"bytes_out": 0, "bytes_per_row": 0, "peak_rss_bytes": 0}
    assert replicas_over_time(StepReport(step="stage 0", replicas=line, **numbers, **zeros)) == shown


def test_the_report_says_for_what_a_gpu_waited():
    figures = {"num_calls": 3, "num_rows": 768, "wall_s": 9.0, "cpu_s": 1.0, "wall_share": 0.9, "cpu_share": 0.1}
    step = StepReport(step="stage 1", bytes_out=0, bytes_per_row=0.0, peak_rss_bytes=0, **figures)
    assert idle_line(step) is None, "on CPUs"
    waits = {"input": 0.3, "driver": 0.1, "store": 0.05, "unpack": 0.05, "copy": 0.2, "launch": 0.1}
    waited = step.model_copy(update={f"waited_{cause}_s": seconds for cause, seconds in waits.items()})
    assert idle_line(waited) == (
        "GPU of stage 1: computed 90.0 % of the run; waited for stage 0 3.0 %, the driver 1.0 %, the object store "
        "0.5 %, unpacking 0.5 %, copies 2.0 %, launches 1.0 %; before its first batch and after its last 2.0 %"
    )
    assert "waited for decode 3.0 %" in idle_line(waited.model_copy(update={"step": "stage 0"}))
    longer = waited.model_copy(update={"wall_share": 1.0})  # waits beyond the run's end are of clocks that disagree
    assert "computed 91.8 % of the run" in idle_line(longer) and "its last 0.0 %" in idle_line(longer)


def test_the_report_says_how_many_frames_of_clips_were_decoded_for_those_embedded():
    calls = [Measurement("decode", num_rows=4, num_frames=6, num_decoded_frames=30) for _ in range(4)]
    steps, _ = step_reports([*calls, Measurement("stage 0", num_rows=16)], {})
    assert clip_lines(steps) == ["clips: 120 frames decoded for 24 that are embedded, 5.0 for each"]
    assert clip_lines(steps[1:]) == []


def test_the_report_says_what_a_million_items_take_of_a_gpu():
    calls = [Measurement("stage 0", started_s=2.0 * number, wall_s=1.0, num_rows=500) for number in range(5)]
    steps, _ = step_reports([*calls, Measurement("write", started_s=9.0, wall_s=1.0)], {"stage 0": 1})
    places = [PlaceReport(stage=0, device="cuda", num_cpus=1, num_gpus=0.5, num_threads=1)]
    assert gpu_time_lines(steps, places, 2500) == ["GPU time of a million items: 2,000 s, 1,000 of it computing"]
    assert gpu_time_lines(steps, places, 0) == gpu_time_lines(steps, [], 2500) == []


def test_waits_of_a_gpu_are_summed_over_a_steps_calls():
    calls = [Measurement("stage 0", started_s=number, wall_s=0.5, num_rows=8, waited_copy_s=0.1) for number in range(4)]
    [step], _ = step_reports(calls, {"stage 0": 1})
    assert (step.waited_input_s, step.waited_copy_s) == (0, pytest.approx(0.4))
    [step], _ = step_reports(join_measurements(calls, 2), {"stage 0": 1})
    assert step.waited_copy_s == pytest.approx(0.4)


def test_what_a_stages_processes_say_is_told_once_however_many_calls_are_summed():
    calls = [Measurement("stage 0", started_s=number, note="no compiler" * (number in (1, 2))) for number in range(4)]
    for joined in (calls, join_measurements(calls, 2)):
        [step], _ = step_reports(joined, {"stage 0": 1})
        assert step.notes == ("no compiler",)


@pytest.mark.parametrize(
    ("stage_s", "reached", "blamed"),
    [
        (0.02, 60.0, None),
        (0.09, 10.0, "stage 0 took 9.0 times as long as expected"),
        (0.011, 10.0, "no step took longer than expected"),
    ],
)
def test_a_run_that_reaches_less_than_half_names_the_step_to_blame(stage_s, reached, blamed):
    expected = Expected(
        source="measured", items_per_s=100.0, bottleneck="stage 0", seconds_per_item={"stage 0": 0.01, "decode": 0.004}
    )
    review = Review(
        images_per_item=1.0,
        captions_per_item=1.0,
        caption_tokens=16,
        observed_seconds_per_item={"stage 0": stage_s, "decode": 0.005, "other": 9.0},
        expected=expected,
    )
    lines = blame_lines(review, reached)
    assert lines == [] if blamed is None else blamed in lines[0]
    assert blame_lines(review.model_copy(update={"expected": None}), reached) == []
    if stage_s == 0.011:
        assert blame_lines(review, reached, "the others waited for decode")[0].endswith(
            "no step took longer than expected; the others waited for decode"
        )


def test_where_no_step_is_to_blame_the_largest_cause_of_idle_time_is():
    figures = {"num_calls": 3, "num_rows": 768, "wall_s": 2.0, "cpu_s": 1.0, "wall_share": 0.1, "cpu_share": 0.1}
    first, second = (
        StepReport(step=f"stage {number}", bytes_out=0, bytes_per_row=0.0, peak_rss_bytes=0, **figures)
        for number in range(2)
    )
    first = first.model_copy(update={"waited_input_s": 3.0, "waited_driver_s": 11.0})
    second = second.model_copy(update={"waited_input_s": 12.0, "waited_copy_s": 1.0})
    assert largest_wait((first, second), "decode") == "stage 0's GPU waited most for the driver, 55 % of the run"
    second = second.model_copy(update={"waited_input_s": 0.5, "waited_store_s": 12.0})
    assert largest_wait((first, second), "decode").startswith("stage 1's GPU waited most for the object store, ")
    starved = first.model_copy(update={"waited_input_s": 12.0, "waited_driver_s": 1.0})
    assert largest_wait((starved,), None) == "stage 0's GPU waited most for decode, 60 % of the run"
    on_cpus = first.model_copy(update={"waited_input_s": 0.0, "waited_driver_s": 0.0})
    assert largest_wait((on_cpus,), "write") == "the other steps waited for write"
    assert largest_wait((on_cpus,), None) is None


def test_the_shown_report_of_a_slow_run_names_that_cause(make_run, model, tmp_path):
    job = finished_job(make_run, model, samples.folder(tmp_path / "in", 2))
    review = review_run(job, Available(16), *observed((0.022, 0.026), 100, 100), (COSTS, HOST))
    report = Report(
        run_id="r",
        started_at=datetime(2026, 1, 1, tzinfo=UTC),
        wall_s=60,
        versions={},
        items_per_s=10,
        steps=observed((0.022, 0.026), 100, 100)[0],
        observed_bottleneck="decode",
        review=review,
    )
    lines = [part for part in report_parts(report) if isinstance(part, str) and "less than half" in part]
    assert lines == [
        "less than half of what was expected was reached: no step took longer than expected; "
        "the other steps waited for decode"
    ]
