"""The pace of the scheduling loop follows the seconds of the calls; two processes and a clock are not needed for it."""

import pytest

from embedder.compat.pace import (
    FEWEST_IN_FLIGHT,
    MIN_WAIT_S,
    MOST_IN_FLIGHT,
    PAUSE_S,
    WAIT_S,
    Pace,
    StageCalls,
    calls_in_flight,
    pace,
)

TURN_S = 0.01
STORE_BYTES = 512 << 20
MIB = 1 << 20
AS_SLOW_AS_EVER = Pace(WAIT_S, PAUSE_S)


def stage(call_s, *, block_mib=12.0, num_replicas=1, has_queue=True):
    return StageCalls(call_s, block_mib * MIB, num_replicas, has_queue)


def paced(*stages, starved_decode_s=None):
    held = [(each, calls_in_flight(each, TURN_S, STORE_BYTES)) for each in stages]
    return pace(held, TURN_S, starved_decode_s)


@pytest.mark.parametrize("num_stages", [0, 1, 3])
def test_while_calls_last_longer_than_a_turn_all_is_as_before(num_stages):
    stages = [stage(0.3)] * num_stages
    assert paced(*stages) == AS_SLOW_AS_EVER
    assert [calls_in_flight(each, TURN_S, STORE_BYTES) for each in stages] == [FEWEST_IN_FLIGHT] * num_stages


@pytest.mark.parametrize("call_s", [0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 5.0])
@pytest.mark.parametrize("block_mib", [0.01, 12.0, 40.0])
def test_a_replica_has_work_until_the_loop_has_turned_again_or_the_loop_turns_as_fast_as_it_may(call_s, block_mib):
    calls = stage(call_s, block_mib=block_mib)
    in_flight = calls_in_flight(calls, TURN_S, STORE_BYTES)
    found = pace([(calls, in_flight)], TURN_S)
    lasts_s = (in_flight - 1) * (call_s + 0.005)
    assert found.wait_s + found.pause_s + TURN_S <= lasts_s + 1e-9 or found == Pace(MIN_WAIT_S)
    assert MIN_WAIT_S <= found.wait_s <= WAIT_S and 0 <= found.pause_s <= PAUSE_S


def test_a_replica_holds_more_short_calls_as_far_as_their_bytes_allow():
    assert calls_in_flight(stage(0.05), TURN_S, STORE_BYTES) == 6
    assert calls_in_flight(stage(0.001, block_mib=1), TURN_S, STORE_BYTES) == MOST_IN_FLIGHT
    assert calls_in_flight(stage(0.001), TURN_S, STORE_BYTES) == 10
    assert calls_in_flight(stage(0.001, num_replicas=4), TURN_S, STORE_BYTES) == FEWEST_IN_FLIGHT
    assert calls_in_flight(stage(0.001), TURN_S, float("inf")) == MOST_IN_FLIGHT


def test_the_shortest_calls_set_the_pace():
    short = stage(0.01, num_replicas=4)
    assert paced(stage(5.0), short, stage(5.0)) == Pace(MIN_WAIT_S)
    assert paced(short, stage(5.0)).pause_s == 0


def test_the_loop_turns_faster_only_for_a_stage_that_has_more_to_do():
    idle = stage(0.01, num_replicas=4, has_queue=False)
    assert paced(idle) == Pace(WAIT_S)


@pytest.mark.parametrize(("decode_s", "expected"), [(0.2, Pace(WAIT_S)), (6.0, AS_SLOW_AS_EVER)])
def test_without_a_pause_where_short_decode_tasks_are_waited_for(decode_s, expected):
    assert paced(stage(5.0), starved_decode_s=decode_s) == expected
