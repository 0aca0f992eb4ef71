"""Measurements behind a run's report: replicas over time, CPU of all processes, Ray's share."""

import json
import subprocess
import sys
import time

import psutil
import pytest
from store_samples import begin

from embedder.engine.cpu_use import CpuUse, beside_steps
from embedder.planning.ray_overhead import EngineShare, EngineUse, engine_uses, fitted
from embedder.report.replica_timeline import replica_seconds, timeline
from embedder.report.schema import step_reports
from embedder.store.files import StoreFiles
from embedder.store.layout import run_file


def call(step, pid, started_s, wall_s, **changes):
    """One measurement of a step, of ten rows."""
    counts = {"num_rows": 10, "num_images": 10, "num_captions": 0, "num_tokens": 0}
    return {
        "step": step,
        "node": "here",
        "pid": pid,
        "started_s": started_s,
        "wall_s": wall_s,
        "cpu_s": wall_s / 2,
        "bytes_out": 100,
        "peak_rss_bytes": 1,
        **counts,
        **changes,
    }


GROWING = [
    call("stage 0", 1, 100.0, 2.0),
    call("stage 0", 1, 104.0, 6.0),
    call("stage 0", 2, 105.0, 3.0),
    call("stage 0", 2, 108.0, 1.0),
]


def test_a_stage_that_grew_is_shown_over_time():
    assert timeline(GROWING, 100.0) == [(0.0, 1), (5.0, 2), (9.0, 1), (10.0, 0)]


def test_a_replica_that_came_later_had_less_time():
    assert replica_seconds(GROWING, (100.0, 110.0), num_at_start=1) == pytest.approx(10 + 5)
    assert replica_seconds(GROWING, (100.0, 110.0), num_at_start=2) == pytest.approx(20)


def test_shares_of_a_grown_stage_are_those_of_one_replica():
    decode = [call("decode", 3, 100.0, 1.0)]
    steps, window = step_reports([*decode, *GROWING], {"stage 0": 1})
    assert window == (100.0, 110.0)
    assert [step.step for step in steps] == ["decode", "stage 0"]
    assert steps[0].wall_share == pytest.approx(0.1)
    assert steps[1].wall_share == pytest.approx(12 / 15)
    assert (steps[1].max_replicas, steps[0].replicas) == (2, ())


def test_no_measurements_are_no_steps():
    assert step_reports([], {}) == ([], (0.0, 0.0))


def test_cpu_seconds_of_children_are_counted_also_after_their_end():
    use = CpuUse()
    use.look([psutil.Process()])
    started_s = time.time()
    program = "import time\nwhile time.process_time() < 0.3: pass\nprint(1, flush=True)\ninput()"
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    child.stdout.readline()
    use.look([psutil.Process(), psutil.Process(child.pid)])
    child.communicate("\n")
    use.look([psutil.Process()])
    found_s = use.between(started_s, time.time())
    assert 0.2 < found_s < 3


def test_cpu_seconds_between_looks_are_a_straight_line():
    use = CpuUse([(10.0, 1.0), (20.0, 3.0), (30.0, 3.0)])
    assert use.between(15.0, 25.0) == pytest.approx(1.0)
    assert use.between(0.0, 40.0) == pytest.approx(2.0)
    assert CpuUse().between(0.0, 1.0) == 0.0


def test_ray_s_share_of_an_item_fills_the_cores():
    share = EngineShare(cores=0.2, call_s=0.01)
    item_s, calls_per_item = 0.09, 0.125
    engine_s = share.per_item(item_s, calls_per_item, num_cores=2)
    items_per_s = 2 / (item_s + engine_s)
    assert items_per_s * (item_s + calls_per_item * 0.01) + 0.2 == pytest.approx(2)


def test_ray_s_share_follows_what_runs_found_within_reason():
    usual = EngineShare(cores=0.1, call_s=0.01, start_s=3.0)
    found = fitted([EngineUse(cores=0.5, calls_per_s=10, window_s=60)], usual)
    assert (found.cores, found.call_s) == (pytest.approx(0.2), pytest.approx(0.02))
    assert fitted([EngineUse(cores=100.0, calls_per_s=10, window_s=60)], usual).cores == pytest.approx(0.4)
    assert fitted([], usual) == usual


def test_ray_s_share_leaves_out_the_start_of_the_stages():
    use = CpuUse([(100.0, 0.0), (104.0, 40.0), (110.0, 52.0)])
    calls = [call("decode", 1, 100.0, 4.0), call("stage 0", 2, 105.0, 4.0)]  # 2 CPU seconds each
    assert beside_steps(use, calls, all_up_s=104.0, stop_s=110.0) == (pytest.approx(12.0 - 2.0), pytest.approx(6.0))
    assert beside_steps(use, calls, all_up_s=109.5, stop_s=110.0) is None


def test_a_store_s_earlier_runs_tell_ray_s_share(tmp_path):
    files = StoreFiles(tmp_path / "store")
    run, _ = begin(files)
    assert engine_uses(str(tmp_path / "store")) == []
    report = {"engine_cores": 0.3, "window_s": 60.0, "steps": [{"num_calls": 100}, {"num_calls": 20}], "more": 1}
    files.write(run_file(run.run_id, "report.json"), json.dumps(report).encode())
    assert engine_uses(str(tmp_path / "store")) == [EngineUse(cores=0.3, calls_per_s=2.0, window_s=60.0)]
    files.write(run_file(run.run_id, "report.json"), json.dumps(report | {"window_s": 3.0}).encode())
    assert engine_uses(str(tmp_path / "store")) == [], "too short to tell"
    assert engine_uses(None) == []
