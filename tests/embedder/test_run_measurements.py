"""What a run's report is computed from: replicas over time, CPU of all processes, Ray's share."""

import subprocess
import sys
import time

import psutil
import pytest

from embedder.planning.engine import EngineShare, EngineUse, fitted
from embedder.run.cpu_use import CpuUse
from embedder.run.replicas import replica_seconds, timeline
from embedder.run.report import step_reports


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
    use = CpuUse()
    use._totals = [(10.0, 1.0), (20.0, 3.0), (30.0, 3.0)]
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
    found = fitted([EngineUse(cpu_s=14.0, window_s=30.0, num_calls=100)], usual)
    assert (found.cores, found.call_s) == (pytest.approx(0.2), pytest.approx(0.02))
    assert fitted([EngineUse(cpu_s=1000.0, window_s=30.0, num_calls=100)], usual).cores == pytest.approx(0.4)
    assert fitted([EngineUse(cpu_s=9.0, window_s=1.0, num_calls=1)], usual) == usual, "too short to tell"
    assert fitted([], usual) == usual
