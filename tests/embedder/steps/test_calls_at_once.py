"""So many calls of a stage run at once as a trial found best, and never more than pays."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from embedder.batch_schema import Measurement
from embedder.steps.calls_at_once import NUM_TRIALS, CallsAtOnce

MOST = 3
BATCHES = MOST + NUM_TRIALS  # of each number that is tried


def batch(seconds, **waited_s):
    """A batch that took so many seconds, half of them the device's."""
    return Measurement("stage 0", wall_s=seconds / 2, waited_copy_s=seconds / 2, num_rows=256, **waited_s)


def try_numbers(cost_s):
    """Note batches until a number is chosen; the numbers that were tried, and the choice."""
    calls, tried = CallsAtOnce(MOST), []
    while calls.chosen is None:
        tried.append(calls._limit)
        calls.note(batch(cost_s(tried[-1], tried.count(tried[-1]))))
    return sorted(set(tried), reverse=True), calls.chosen


@pytest.mark.parametrize(
    ("costs_s", "tried", "chosen"),
    [
        ({3: 1.0, 2: 1.0, 1: 1.3}, [3, 2, 1], 2),  # as on an H200
        ({3: 1.0, 2: 1.1}, [3, 2], 3),  # with one it would be slower still
        ({3: 1.0, 2: 0.9, 1: 0.91}, [3, 2, 1], 1),
        ({3: 1.0, 2: 0.99, 1: 1.2}, [3, 2, 1], 2),
        ({3: 1.2, 2: 1.0, 1: 1.1}, [3, 2, 1], 2),  # as with threads of one interpreter, which hinder each other
    ],
)
def test_the_fewest_calls_that_are_as_fast_as_any_are_taken(costs_s, tried, chosen):
    assert try_numbers(lambda number, _: costs_s[number]) == (tried, chosen)


def test_batches_that_began_with_another_number_do_not_count():
    late_s = {3: 9.0, 2: 9.0, 1: 0.01}  # of the first of each number, which loads kernels, or was in flight
    assert try_numbers(lambda number, at: late_s[number] if at <= MOST else {3: 1.0, 2: 1.0, 1: 2.0}[number])[1] == 2


def test_batches_of_a_starved_device_decide_on_no_number():
    calls = CallsAtOnce(MOST)
    for _ in range(10 * BATCHES):
        calls.note(batch(1.0, waited_driver_s=0.1))
    assert (calls.chosen, calls._limit) == (None, MOST)
    for number in (3, 2, 1):
        for _ in range(BATCHES):
            calls.note(batch(1.0 if number > 1 else 2.0, waited_input_s=0.01))
    assert calls.chosen == 2


def test_never_more_run_at_once_than_the_trial_allows():
    calls, lock, inside, seen = CallsAtOnce(MOST), threading.Lock(), [], []

    def run(number):
        with calls.call():
            with lock:
                inside.append(number)
                seen.append((len(inside), calls._limit, calls.chosen))
            calls.note(batch(1.0))
            with lock:
                inside.remove(number)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(run, range(20 * BATCHES)))
    assert calls.chosen == 1, "all are equally fast"
    assert max(running for running, _, _ in seen) <= MOST
    assert {running for running, _, chosen in seen[-BATCHES:] if chosen} == {1}


def test_stages_that_share_a_device_keep_all_calls():
    calls = CallsAtOnce(MOST, is_tried=False)
    for _ in range(10 * BATCHES):
        calls.note(batch(1.0))
    assert calls.chosen == calls._limit == MOST


def test_a_call_that_fails_makes_room_for_the_next():
    calls = CallsAtOnce(1)
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"), calls.call():
            raise ValueError("broken")
    with calls.call():
        assert calls.chosen == 1
