"""Pace of Ray Data's scheduling loop, from measured seconds of calls. Pure.

A turn of the loop takes 5 ms of CPU or more, and hands each replica of a stage as many calls as it may hold, so these
must last a whole turn. With long calls, two are enough, and pauses between the turns save CPU. With short calls, a
replica first holds more of them; if their bytes forbid that, the loop turns faster.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

WAIT_S = 0.1  # for which Ray Data waits for finished tasks, in each turn
MIN_WAIT_S = 0.02  # more frequent turns would take a quarter of a core
PAUSE_S = 0.15  # between two turns, while all calls are long
CALL_OVERHEAD_S = 0.005  # of Ray between two calls of one replica
FEWEST_IN_FLIGHT = 2  # of Ray Data: one is computed while the next is ready
MOST_IN_FLIGHT = 16
STORE_PART = 4  # a stage's calls in flight may hold one part in so many of the shared memory
STARVED_SHARE = 0.1  # of a decode task's seconds; in a longer turn its CPU waits for the loop, and a stage for it


@dataclass(frozen=True)
class StageCalls:
    """Measurements of one stage's calls.

    `call_s` is the mean of the latest calls on their replica, `block_bytes` the mean input of a call; `has_queue` says
    whether blocks wait because no replica has room.
    """

    call_s: float
    block_bytes: float
    num_replicas: int
    has_queue: bool


@dataclass(frozen=True)
class Pace:
    """Seconds of one turn of the loop besides its own work.

    `wait_s` is the longest wait for finished tasks, `pause_s` the pause after it.
    """

    wait_s: float = WAIT_S
    pause_s: float = 0.0


def calls_in_flight(stage: StageCalls, turn_s: float, store_bytes: float) -> int:
    """Return the calls that a replica should hold, so that it has work until the loop has turned once more.

    `turn_s` are the CPU seconds of a turn, `store_bytes` is the shared memory of the run.
    """
    longest_s = WAIT_S + PAUSE_S + turn_s
    wanted = math.ceil(longest_s / _seconds_of(stage)) + 1  # of the current one, only the rest is left to compute
    room = store_bytes / STORE_PART / max(1.0, stage.block_bytes * stage.num_replicas)
    return max(FEWEST_IN_FLIGHT, int(min(wanted, MOST_IN_FLIGHT, room)))


def pace(stages: Sequence[tuple[StageCalls, int]], turn_s: float, starved_decode_s: float | None = None) -> Pace:
    """Return how long the loop may rest between two turns.

    `stages` has the calls of each stage that has had some, and how many of them a replica holds; `turn_s` are the CPU
    seconds of a turn, and `starved_decode_s` those of a decode task, if the first stage mostly waits for one.
    """
    rests_s = [(in_flight - 1) * _seconds_of(stage) - turn_s for stage, in_flight in stages]
    queued_s = [rest_s for rest_s, (stage, _) in zip(rests_s, stages, strict=True) if stage.has_queue]
    if starved_decode_s is not None:
        rests_s.append(STARVED_SHARE * starved_decode_s)
    shortest_s = min(rests_s, default=WAIT_S + PAUSE_S)
    if shortest_s >= WAIT_S:
        return Pace(WAIT_S, min(PAUSE_S, shortest_s - WAIT_S))
    return Pace(min(WAIT_S, max(MIN_WAIT_S, min(queued_s, default=WAIT_S))), 0.0)


def _seconds_of(stage: StageCalls) -> float:
    return stage.call_s + CALL_OVERHEAD_S
