"""Scheduling of short calls on a real Ray, judged by counts and not by the clock; and the law that is fitted."""

import bench_scheduling
import pytest
from bench_scheduling import Paced, Window, law_of

from embedder.compat.pace import FEWEST_IN_FLIGHT


@pytest.mark.slow
def test_a_replica_of_short_calls_may_hold_several(ray_cluster, monkeypatch):
    """How often the loop turns for a call depends on what decoding gets of a busy machine."""
    ray_cluster.cloudpickle.register_pickle_by_value(bench_scheduling)
    monkeypatch.setattr(bench_scheduling, "DECODE_CPUS", 0.2)
    try:
        window = Window(warm_s=1.0, seconds=0.0, num_calls=200)
        found = bench_scheduling.measure(1, 4000, num_rows=64, row_bytes=4096, window=window)
    finally:
        ray_cluster.cloudpickle.unregister_pickle_by_value(bench_scheduling)
    assert found.in_flight > 2 * FEWEST_IN_FLIGHT
    assert found.turns_per_call > 0


def test_the_law_finds_what_turns_replicas_and_calls_cost():
    def run(num_actors, *calls_per_turn):
        seconds = [(10.0, 10.0 * calls, 10 * (0.004 + 0.0002 * num_actors + 0.005 * calls)) for calls in calls_per_turn]
        return Paced(num_actors, *[1.0] * 9, in_flight=2, seconds=seconds)

    law = law_of([run(1, 0, 1, 5), run(25, 2, 9), run(50, 1, 7, 30)])
    assert (law.turn_ms, law.replica_ms, law.call_ms) == pytest.approx((4.0, 0.2, 5.0))
    assert law.miss == pytest.approx(0.0, abs=1e-6)
    assert law.calls_per_s == pytest.approx(200 / (0.004 + 0.02 + 1.0))
