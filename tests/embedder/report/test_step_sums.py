"""Sums over a run's measurements: steps, replicas over time, and CPU outside all steps."""

import pytest

from embedder.batch_schema import Measurement
from embedder.executors.monitor import CpuUse
from embedder.report.step_sums import (
    cores_beside_steps,
    join_measurements,
    replica_seconds,
    split_loads,
    steady_part,
    step_reports,
    timeline,
)


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


def steady_run(num_calls, call_s=2.0, loaded_s=10.0):
    """Decode runs ahead while the stage loads; its first call warms up, and takes ten seconds more."""
    decode = [call("decode", 1, float(number), 1.0) for number in range(num_calls)]
    stage = [call("stage 0", 2, loaded_s, call_s + 10)]
    stage += [call("stage 0", 2, loaded_s + 10 + number * call_s, call_s) for number in range(1, num_calls)]
    loads, calls = split_loads([call("load 0", 2, 0.0, loaded_s), *decode, *stage])
    return calls, loads, step_reports(calls, {"stage 0": 1})[0]


def test_the_steady_part_leaves_out_the_loading_and_the_first_call():
    calls, loads, steps = steady_run(26)
    part = steady_part(calls, loads, steps, "stage 0")
    assert (part.seconds, part.rows_per_s, part.too_short) == (pytest.approx(50.0), pytest.approx(5.0), None)
    decode, stage = part.steps
    assert stage.wall_s == pytest.approx(26 * 2.0), "as if the first call had been one of the others"
    assert decode.num_rows == 260 and decode.wall_s == pytest.approx(26 * 1.0), "raised to all rows"


@pytest.mark.parametrize(
    ("num_calls", "call_s", "reason"), [(15, 2.0, "28 s and had 14 blocks"), (10, 9.0, "81 s and had 9 blocks")]
)
def test_a_short_run_says_why_it_says_nothing(num_calls, call_s, reason):
    part = steady_part(*steady_run(num_calls, call_s), "stage 0")
    assert reason in part.too_short and part.too_short.endswith("30 s and 20 blocks are needed")


def test_a_run_that_ended_before_all_stages_were_up_is_short():
    calls, loads, steps = steady_run(26)
    late, _ = split_loads([call("load 1", 3, 0.0, 999.0)])
    part = steady_part(calls, [*loads, *late], steps, "stage 0")
    assert part.too_short.startswith("once all stages were up, the run lasted 0 s and had 0 blocks")
    assert steady_part([], [], [], "stage 0").rows_per_s == 0.0


def test_calls_beyond_the_limit_are_joined_and_their_sums_stay():
    calls = [call(f"stage {number % 2}", number % 4, 100.0 + number, 0.75) for number in range(1000)]
    loads = [call(f"load {number}", number, 90.0, 8.0) for number in range(2)]
    few = join_measurements([*loads, *reversed(calls)], limit=100)
    assert len(few) <= 100
    assert join_measurements([*loads, *calls]) == [*loads, *calls]
    for each in (few, [*loads, *calls]):
        own_loads, own_calls = split_loads(each)
        steps, window = step_reports(own_calls, {"stage 0": 2, "stage 1": 2})
        assert len(own_loads) == 2
        assert [(step.num_calls, step.num_rows, step.bytes_out) for step in steps] == [(500, 5000, 50_000)] * 2
        assert [step.wall_s for step in steps] == pytest.approx([375.0, 375.0])
        assert [step.max_replicas for step in steps] == [2, 2]
        assert window == pytest.approx((100.0, 1099.75), abs=40)
        steady = steady_part(own_calls, own_loads, steps, "stage 1")
        assert steady.rows_per_s == pytest.approx(5.0, rel=0.1)
        assert steady.too_short is None


def test_processes_that_are_many_are_told_apart_beyond_the_limit():
    calls = [call("decode", number, 100.0, 1.0) for number in range(50)]
    assert len({each.pid for each in join_measurements(calls, limit=10)}) == 50
