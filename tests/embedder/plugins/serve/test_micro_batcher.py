"""Requests that come together are computed together; a single one doesn't wait; too many are refused."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from embedder.plugins.serve.micro_batcher import BusyError, MicroBatcher

LONG_S = 60.0


def run(scenario, compute, **options):
    """Run a scenario with a queue in front of a function of batches; gives what it returns."""

    async def go():
        with ThreadPoolExecutor(2) as executor:
            defaults = {"num_workers": 1, "max_batch": 4, "max_queue": 100, "max_wait_s": 0.0}
            batcher = MicroBatcher(compute, executor, **(defaults | options))
            found = await asyncio.wait_for(scenario(batcher), LONG_S)
            await batcher.drain()
            return found

    return asyncio.run(go())


class Batches:
    """Function that notes the batches it gets; the first one waits until it is let go."""

    def __init__(self, held=False):
        self.batches = []
        self.go = threading.Event()
        if not held:
            self.go.set()

    def __call__(self, batch):
        self.batches.append(list(batch))
        assert self.go.wait(LONG_S)
        return [each * 10 for each in batch]

    async def begun_by(self, queue):
        """Submit a first request, and wait until it is computed on."""
        first = queue.submit(0)
        while not self.batches:
            await asyncio.sleep(0.001)
        return first


def test_requests_of_one_turn_make_batches_of_the_largest_size_in_their_order():
    compute = Batches()
    answers = run(lambda queue: asyncio.gather(*map(queue.submit, range(10))), compute)
    assert answers == [each * 10 for each in range(10)]
    assert compute.batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_one_alone_does_not_wait_for_others():
    assert run(lambda queue: queue.submit(1), Batches(), max_wait_s=LONG_S * 2) == 10


def test_requests_that_come_during_a_batch_make_the_next():
    compute = Batches(held=True)

    async def scenario(queue):
        first = await compute.begun_by(queue)
        others = [queue.submit(each) for each in (1, 2)]
        compute.go.set()
        return await asyncio.gather(first, *others)

    assert run(scenario, compute) == [0, 10, 20]
    assert compute.batches == [[0], [1, 2]]


def test_a_full_queue_refuses_and_serves_again_once_it_is_not():
    compute = Batches(held=True)

    async def scenario(queue):
        first = await compute.begun_by(queue)
        waiting = [queue.submit(each) for each in (1, 2)]
        with pytest.raises(BusyError, match="max_queue = 2 allows no further query"):
            queue.submit(3)
        compute.go.set()
        await asyncio.gather(first, *waiting)
        return await queue.submit(4)

    assert run(scenario, compute, max_queue=2) == 40


def test_an_error_of_one_is_its_own_and_one_of_the_batch_is_everybodys():
    def compute(batch):
        if "all" in batch:
            raise OSError("gone")
        return [ValueError(each) if each == "bad" else each for each in batch]

    async def scenario(queue):
        first = await asyncio.gather(*map(queue.submit, ["good", "bad"]), return_exceptions=True)
        second = await asyncio.gather(*map(queue.submit, ["good", "all"]), return_exceptions=True)
        return [type(each) for each in (*first, *second)]

    assert run(scenario, compute) == [str, ValueError, OSError, OSError]


def test_who_went_away_is_not_computed():
    compute = Batches(held=True)

    async def scenario(queue):
        first = await compute.begun_by(queue)
        gone, there = queue.submit(1), queue.submit(2)
        gone.cancel()
        compute.go.set()
        return await asyncio.gather(first, there)

    assert run(scenario, compute) == [0, 20]
    assert compute.batches == [[0], [2]]
