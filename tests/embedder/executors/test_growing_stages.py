"""A stage that can't keep up gets more replicas during the run, on a real Ray with two CPUs."""

import pytest
import samples
from embedding_runs import embedded
from heavy_models import heavy_model


@pytest.fixture
def heavy_pictures(tmp_path):
    """A model that takes 30 to 60 ms of a core for a picture, almost all of it in the middle of three stages."""
    return heavy_model(tmp_path, [(0, 0), (0, 1), (12, 1), (12, 2)])


@pytest.mark.slow
def test_the_slow_stage_gains_replicas_and_the_others_do_not(make_run, heavy_pictures, tmp_path, ray_cluster):
    growing = {"replicas": {"min": 1, "max": 3}, "num_cpus": 0.2, "num_threads": 1}
    still = {"replicas": {"min": 1, "max": 3}, "num_cpus": 0.1, "num_threads": 1}
    num_items = 900
    config = make_run(
        samples.folder(tmp_path / "in", num_images=num_items),
        engine="ray",
        stage=[still, growing, still],
        batch_size=8,
        decode={"num_cpus": 0.5, "items_per_task": 16},
        no_progress_timeout_s=240,
        **heavy_pictures,
    )
    report, rows = embedded(config)
    assert (report.num_items, len(rows)) == (num_items, num_items)
    steps = {step.step: step for step in report.steps}
    assert steps["stage 1"].max_replicas > 1
    first, second = steps["stage 1"].replicas[:2]
    assert (first[1], second[1]) == (1, 2), "it began with one, and gained another while it worked"
    assert steps["stage 2"].max_replicas == 1, "what waits for a slow stage needs no company"
    assert sum(step.num_rows for step in report.steps) == num_items * len(report.steps)
