"""The bottleneck of a run, from the states of its operators."""

import pytest

from embedder.compat.operator_stats import OperatorState, Replica, Sample
from embedder.executors.bottleneck import (
    MAX_SAMPLES,
    OperatorHistory,
    OperatorUse,
    describe_operators,
    find_bottleneck,
    operator_uses,
)

NAMES = ("decode", "stage 0", "stage 1", "write")


@pytest.mark.parametrize(
    ("busy", "waiting", "found"),
    [
        # decode keeps its slots busy, and what follows starves
        ((1.0, 0.3, 0.2, 0.1), (1, 0, 0, 0), "decode"),
        # blocks wait for the first stage, and decode is held back
        ((0.4, 1.0, 0.3, 0.1), (1, 1, 0.1, 0), "stage 0"),
        # decode and stage 0 still fill the queue of stage 1
        ((1.0, 1.0, 0.97, 0.1), (1, 1, 1, 0), "stage 1"),
        # a slow sink holds up all that is before it
        ((0.3, 0.4, 0.5, 1.0), (1, 1, 1, 1), "write"),
        # blocks for the write operator wait for each other until they fill a part file
        ((0.3, 0.4, 0.9, 0.05), (1, 1, 1, 0.9), "stage 1"),
        # blocks that come together wait for each other for a moment
        ((0.9, 0.5, 0.4, 0.1), (1, 0.3, 0.3, 0), "decode"),
        # the listing is at its end, and nothing waits
        ((0.0, 0.2, 0.6, 0.1), (0, 0, 0, 0), "stage 1"),
        ((0.0, 0.0, 0.0, 0.0), (1, 0, 0, 0), None),
    ],
)
def test_the_last_operator_that_blocks_wait_for_is_the_bottleneck(busy, waiting, found):
    uses = [OperatorUse(*use) for use in zip(NAMES, busy, waiting, strict=True)]
    assert find_bottleneck(uses) == found


def test_nothing_is_no_bottleneck():
    assert find_bottleneck([]) is None
    assert OperatorHistory().view() is None
    assert OperatorHistory().uses() == ([], None)


def replicas(number, *, restarting=0):
    return tuple(Replica(f"actor {n}", "node", n < restarting) for n in range(number))


def sample(time_s, *, work_s=(0, 0, 0), calls=100, tasks=(2, 2, 0), queued=(9, 5, 0), num_replicas=1, restarting=0):
    """A sample of decode, a stage and write; calls are numbered by the time."""
    return Sample(
        time_s,
        (
            OperatorState("decode", queued[0], tasks[0], work_s=work_s[0], num_calls=int(calls * time_s)),
            OperatorState(
                "stage 0",
                queued[1],
                tasks[1],
                replicas(num_replicas, restarting=restarting),
                num_cpus=0.25 * num_replicas,
                object_store_bytes=3 << 20,
                work_s=work_s[1],
                num_calls=int(calls * time_s),
            ),
            OperatorState("write", queued[2], tasks[2], work_s=work_s[2], num_calls=int(calls * time_s)),
        ),
    )


def test_busy_share_is_that_of_all_replicas_and_of_the_tasks_that_ran_at_once():
    samples = [sample(0, num_replicas=4), sample(10, work_s=(5, 20, 1), num_replicas=4)]
    decode, stage, write = operator_uses(samples)
    assert (decode.busy_share, stage.busy_share, write.busy_share) == (0.25, 0.5, 0.1)
    assert (decode.waiting_share, stage.waiting_share, write.waiting_share) == (1, 1, 0)


def test_calls_longer_than_the_time_between_samples_count_by_the_tasks_under_way():
    """No call has ended yet, so Ray knows of no second inside one."""
    samples = [sample(time_s, calls=0, tasks=(0, 1, 0), queued=(9, 0, 0)) for time_s in (0, 2, 4)]
    decode, stage, _ = operator_uses(samples)
    assert (decode.busy_share, stage.busy_share) == (0.0, 1.0)
    assert stage.waiting_share == 0, "its one replica works on the one block that it has"


def test_a_sample_weighs_by_the_time_until_the_next_one():
    samples = [sample(0, queued=(0, 0, 0), tasks=(1, 1, 0)), sample(1), sample(10)]
    assert operator_uses(samples)[0].waiting_share == pytest.approx(0.9)


def test_what_a_run_shows_is_of_the_last_seconds_and_leaves_out_the_start():
    history = OperatorHistory()
    history.add(sample(0, num_replicas=0))
    assert history.view().bottleneck is None, "the stage still loads"
    for time_s in range(2, 40, 2):
        history.add(sample(time_s, work_s=(time_s, 0, 0), queued=(9, 0, 0), tasks=(1, 0, 0)))
    assert history.view().bottleneck == "decode"
    for time_s in range(40, 70, 2):
        history.add(sample(time_s, work_s=(40, time_s - 40, 0)))
    assert history.view().bottleneck == "stage 0"
    line = describe_operators(history.view())
    assert "stage 0: queue 5, tasks 2, replicas 1, CPUs 0.25, GPUs 0, store 3.0 MiB; write: queue 0" in line
    assert line.endswith("bottleneck: stage 0")


def test_a_run_of_seconds_names_no_bottleneck():
    history = OperatorHistory()
    for time_s in range(0, 10, 2):
        history.add(sample(time_s, work_s=(0, time_s, 0)))
    uses, found = history.uses()
    assert (uses[1].busy_share, found) == (1.0, None)
    history.add(sample(10, work_s=(0, 10, 0)))
    assert history.uses()[1] == "stage 0"


def test_a_stage_that_was_done_before_a_sample_saw_it_counts_as_up():
    """Its replicas are gone by then; what comes after it is still at work."""
    history = OperatorHistory()
    history.add(sample(0, num_replicas=0, tasks=(1, 0, 0)))
    for time_s in range(2, 20, 2):
        history.add(sample(time_s, work_s=(0, 0, time_s), num_replicas=0, tasks=(0, 0, 1), queued=(0, 0, 9)))
    assert history.uses()[1] == "write"


def test_a_replica_that_starts_again_computes_nothing():
    uses = operator_uses([sample(0, num_replicas=2, restarting=1), sample(4, work_s=(0, 4, 0), num_replicas=2)])
    assert uses[1].busy_share == 1.0, "one of the two replicas was there"
    shown = sample(0, num_replicas=2, restarting=1)
    history = OperatorHistory()
    history.add(shown)
    assert "replicas 1 (+1 starting)" in describe_operators(history.view())


def test_a_long_run_keeps_its_peaks_and_sums_in_few_samples():
    history = OperatorHistory()
    history.add(sample(0))
    history.add(sample(1, queued=(77, 5, 0)))
    for number in range(3 * MAX_SAMPLES):
        history.add(sample(2 + number, work_s=(0, number / 2, 0)))
    assert len(history.samples) <= MAX_SAMPLES + 1
    assert history.peaks["decode"].queued_blocks == 77
    assert history.samples[0].time_s == 0 and history.samples[-1].time_s == 1 + 3 * MAX_SAMPLES
    assert history.uses()[0][1].busy_share == pytest.approx(0.5, rel=0.01)
