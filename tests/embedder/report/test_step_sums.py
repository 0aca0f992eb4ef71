"""Sums over a run's measurements: steps, replicas over time, and CPU beside all steps."""

import pytest

from embedder.engine.monitor import CpuUse
from embedder.report.step_sums import cores_beside_steps, replica_seconds, split_loads, step_reports, timeline
from embedder.store.step_metrics import Measurement


def call(step, pid, started_s, wall_s):
    """One measurement of a step, of ten rows."""
    values = {"cpu_s": wall_s / 2, "num_rows": 10, "num_images": 10, "bytes_out": 100, "peak_rss_bytes": 1}
    return Measurement(step, "here", pid, started_s, wall_s, **values)


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


def test_cores_beside_the_steps_leave_out_the_start_of_the_stages():
    use = CpuUse([(100.0, 0.0), (104.0, 40.0), (110.0, 52.0)])
    calls = [call("decode", 1, 100.0, 4.0), call("stage 0", 2, 105.0, 4.0)]  # 2 CPU seconds each
    loads, steps = split_loads([call("load 0", 2, 100.0, 4.0), call("load 0", 3, 107.0, 2.5), *calls])
    assert steps == calls
    assert cores_beside_steps(use, calls, loads, stop_s=110.0) == pytest.approx((12.0 - 2.0) / 6.0), "a later replica"
    late, _ = split_loads([call("load 0", 2, 100.0, 9.5)])
    assert cores_beside_steps(use, calls, late, stop_s=110.0) is None
