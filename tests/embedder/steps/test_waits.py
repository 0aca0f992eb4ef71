"""For what a device without input waited: the step before, Ray's driver, the object store, or unpacking."""

import time
from inspect import signature

import pyarrow as pa
import pytest
from ray.data import ActorPoolStrategy

from embedder.batch_schema import TRACE
from embedder.compat.operator_stats import sampled_to, sent_s
from embedder.compat.ray_data import actor_pool, map_blocks
from embedder.executors.ray_session import ray_session
from embedder.steps.waits import Arrival, InputWaits


@pytest.mark.parametrize(
    ("waited_s", "expected"),
    [
        (10.0, InputWaits(3.0, 2.0, 4.0, 1.0)),
        (6.0, InputWaits(0.0, 1.0, 4.0, 1.0)),  # the device still computed when the block was made
        (0.5, InputWaits(0.0, 0.0, 0.0, 0.5)),
        (0.0, InputWaits(0.0, 0.0, 0.0, 0.0)),
    ],
)
def test_a_wait_is_split_at_the_times_of_the_blocks_way(waited_s, expected):
    assert Arrival(made_s=103.0, sent_s=105.0, came_s=109.0).split(waited_s, 110.0) == pytest.approx(expected)


@pytest.mark.parametrize("arrival", [Arrival(115.0, 90.0, 120.0), Arrival(108.0, 104.0, 106.0)])
def test_clocks_that_disagree_move_seconds_between_causes_and_lose_none(arrival):
    waits = arrival.split(10.0, 110.0)
    assert sum(waits) == pytest.approx(10.0)
    assert min(waits) >= 0


def test_a_block_was_made_when_the_last_of_its_batches_left_the_step_before():
    first, last = ({"step": "decode", "started_s": at_s, "wall_s": 1.5} for at_s in (5.0, 6.5))
    calls = [[first], None, [last]]
    trace = pa.chunked_array([pa.array(calls, TRACE)])
    before_s = time.time()
    assert Arrival.of(trace, 9.0)[:2] == (8.0, 9.0)
    nobody = Arrival.of(pa.chunked_array([pa.nulls(3, TRACE)]), None)
    assert nobody.made_s == nobody.sent_s == nobody.came_s >= before_s, "without a trace the wait is the step's before"


@pytest.mark.medium
@pytest.mark.skipif(
    "max_concurrent_calls_per_actor" not in signature(ActorPoolStrategy).parameters,
    reason="this Ray has one call at a time, in a thread which doesn't know its task",
)
def test_a_call_on_ray_knows_when_the_driver_sent_it(ray_cluster):
    class Times:  # here, so that it is sent by value
        def __call__(self, table: pa.Table) -> pa.Table:
            return pa.table({"sent_s": [sent_s() or 0.0], "came_s": [time.time()]})

    started_s = time.time()
    with sampled_to(lambda sample: None), ray_session(None, 60):
        dataset = ray_cluster.data.range(6, override_num_blocks=6)
        options = {"rows_per_batch": 1, "num_gpus": 0, "compute": actor_pool(1, 1, calls_at_once=2), "num_cpus": 0.5}
        called = map_blocks(dataset, Times, (), **options)
        found = called.map_batches(lambda rows: rows, batch_size=None, num_cpus=0.25).take_all()
    assert len(found) == 6
    assert all(started_s < row["sent_s"] <= row["came_s"] for row in found)
    assert sent_s() is None, "here is no call"
