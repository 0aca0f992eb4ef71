"""A run on Ray that is asked to stop keeps what is finished, and its stages give way."""

import os
import signal
import time
from pathlib import Path

import pytest
import samples
from embedding_runs import assert_same, embedded
from stop_runs import Listening, num_kept, once, press, wait_until

from embedder.compat import draining, execution_callbacks
from embedder.errors import RunFailedError
from embedder.ingest.embed import embed
from embedder.observability.log import messages_to

pytestmark = pytest.mark.skipif(not draining.EARLY_END.is_there(), reason="this Ray ends no run early")


@pytest.mark.slow
def test_a_run_on_ray_keeps_what_its_stages_have_finished(make_run, tmp_path, monkeypatch, ray_cluster):
    from embedder import pipeline
    from embedder.compat import ray_callbacks
    from embedder.steps.stage_actor import StageActor

    class Waiting(StageActor):
        """So that not all items are through before anybody has looked."""

        def __call__(self, table):
            if self._run is not None and max(table["item_id"].to_pylist()) >= "pictures/0100.png":
                while not self._run.stop_requested():
                    time.sleep(0.05)
            return super().__call__(table)

    source = samples.folder(tmp_path / "in", num_images=160)
    _, undisturbed = embedded(make_run(source, store=str(tmp_path / "undisturbed")))
    settings = {"batch_size": 4, "decode": {"items_per_task": 8}}
    config = make_run(source, engine="ray", num_stages=1, rows_per_part=10_000, **settings)

    def is_through(self, executor):
        return [*executor._topology][-1].metrics.num_row_inputs_received >= 8

    def press_and_wait():
        """Ray starts no further task until this is over."""
        press()
        wait_until(lambda: list(Path(config.store).glob("runs/*/STOP-*")))

    listening = Listening(config.store)
    with messages_to(listening), monkeypatch.context() as patch:
        patch.setattr(pipeline, "StageActor", Waiting)
        once(patch, ray_callbacks.DrainOnStop, "on_execution_step", press_and_wait, is_through)
        with pytest.raises(RunFailedError, match=r"stopped on request after \d+ items, kept"):
            embed(config)
    (line,) = (place for place, said in enumerate(listening.said) if said.startswith("SIGINT: stopping"))
    assert not listening.asked[line]
    kept = num_kept(config)
    assert 8 <= kept <= 100
    report, rows = embedded(config.model_copy(update={"engine": "local"}))
    assert report.num_unchanged == kept
    assert_same(rows, undisturbed)


@pytest.mark.slow
def test_a_stage_that_hangs_costs_what_is_inside_it_and_nothing_more(make_run, tmp_path, monkeypatch, ray_cluster):
    from embedder import pipeline
    from embedder.compat import ray_callbacks
    from embedder.steps.stage_actor import StageActor

    class Hanging(StageActor):
        def __call__(self, table):
            if self._stage.spec.index == 1 and any(each.endswith("0100.png") for each in table["item_id"].to_pylist()):
                time.sleep(1000)
            return super().__call__(table)

    source = samples.folder(tmp_path / "in", num_images=120, captions=False)
    config = make_run(
        source,
        engine="ray",
        num_stages=2,
        stop_timeout_s=1,
        batch_size=4,
        rows_per_part=10_000,
        decode={"items_per_task": 8},
    )

    def hangs(self, executor):
        write = [*executor._topology][-1]
        return write.metrics.num_row_inputs_received >= 8 and not write.num_active_tasks()

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "StageActor", Hanging)
        once(patch, ray_callbacks.DrainOnStop, "on_execution_step", press, hangs)
        with pytest.raises(RunFailedError, match=r"stopped on request after"):
            embed(config)
    assert num_kept(config) >= 8
    _, rows = embedded(config.model_copy(update={"engine": "local"}))
    assert len(rows) == 120


@pytest.mark.medium
def test_a_run_on_ray_whose_stages_are_not_up_is_not_waited_for(make_run, tmp_path, monkeypatch, ray_cluster):
    from embedder import pipeline
    from embedder.compat import ray_callbacks
    from embedder.steps.stage_actor import StageActor

    class NeverUp(StageActor):
        def __init__(self, spec, run=None):
            time.sleep(1000)

    config = make_run(samples.folder(tmp_path / "in", num_images=20), engine="ray", num_stages=1, stop_timeout_s=1000)
    monkeypatch.setattr(pipeline, "StageActor", NeverUp)
    once(monkeypatch, ray_callbacks.DrainOnStop, "on_execution_step", press)
    with pytest.raises(RunFailedError, match="stopped on request before any item was finished"):
        embed(config)


@pytest.mark.slow
def test_where_ray_has_other_names_a_stopped_run_waits_for_ray_and_keeps_its_rows(
    make_run, tmp_path, monkeypatch, ray_cluster, renamed
):
    from ray.data._internal.execution.execution_callback import ExecutionCallback

    from embedder import pipeline
    from embedder.steps.stage_actor import StageActor

    class Waiting(StageActor):
        def __call__(self, table):
            if self._run is not None and max(table["item_id"].to_pylist()) >= "pictures/0060.png":
                while not self._run.stop_requested():
                    time.sleep(0.05)
            return super().__call__(table)

    left = [signal.SIGINT]

    class Pressing(ExecutionCallback):
        def on_execution_step(self, executor):
            if left and [*executor._topology][-1].metrics.num_row_inputs_received >= 8:
                os.kill(os.getpid(), left.pop())

    config = make_run(
        samples.folder(tmp_path / "in", num_images=80, captions=False),
        engine="ray",
        num_stages=1,
        rows_per_part=8,
        batch_size=4,
        decode={"items_per_task": 8},
    )
    with monkeypatch.context() as patch:
        renamed("ray.data._internal")
        assert execution_callbacks.select_callbacks() == []
        patch.setattr(execution_callbacks, "select_callbacks", lambda: [Pressing])
        patch.setattr(pipeline, "StageActor", Waiting)
        with pytest.raises(RunFailedError, match=r"stopped on request after \d+ items, kept"):
            embed(config)
    kept = num_kept(config)
    assert 8 <= kept < 80
    report, rows = embedded(config.model_copy(update={"engine": "local"}))
    assert report.num_unchanged == kept and len(rows) == 80
