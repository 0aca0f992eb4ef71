"""Answers are remembered within their bytes until they are cleared, and asked for once at a time."""

import asyncio

import pytest

from embedder.plugins.serve.serve_metrics import Metrics
from embedder.plugins.serve.service import ENTRY_BYTES, AnswerCache


class Asking:
    """Function that counts how often it is asked; its futures are answered by hand."""

    def __init__(self):
        self.futures = []

    def __call__(self):
        self.futures.append(asyncio.get_running_loop().create_future())
        return self.futures[-1]


def test_equal_queries_at_the_same_time_are_asked_once_and_remembered_afterwards():
    async def scenario():
        cache, ask = AnswerCache(10_000, Metrics()), Asking()
        waiting = [asyncio.create_task(cache.get("a", ask)) for _ in range(3)]
        await asyncio.sleep(0)
        ask.futures[0].set_result(b"answer")
        assert await asyncio.gather(*waiting) == [b"answer"] * 3
        assert await cache.get("a", ask) == b"answer"
        return len(ask.futures)

    assert asyncio.run(scenario()) == 1


def test_an_answer_that_comes_after_a_publication_is_given_but_not_remembered():
    async def scenario():
        cache, ask = AnswerCache(10_000, Metrics()), Asking()
        early = asyncio.create_task(cache.get("a", ask))
        await asyncio.sleep(0)
        cache.clear()
        late = asyncio.create_task(cache.get("a", ask))
        await asyncio.sleep(0)
        ask.futures[0].set_result(b"old")
        ask.futures[1].set_result(b"new")
        return await early, await late, await cache.get("a", ask)

    assert asyncio.run(scenario()) == (b"old", b"new", b"new")


def test_an_error_is_everybodys_who_waits_and_not_remembered():
    async def scenario():
        cache, ask = AnswerCache(10_000, Metrics()), Asking()
        waiting = [asyncio.create_task(cache.get("a", ask)) for _ in range(2)]
        await asyncio.sleep(0)
        ask.futures[0].set_exception(ValueError("wrong"))
        for each in waiting:
            with pytest.raises(ValueError, match="wrong"):
                await each
        again = asyncio.create_task(cache.get("a", ask))
        await asyncio.sleep(0)
        ask.futures[1].set_result(b"right")
        return await again

    assert asyncio.run(scenario()) == b"right"


def test_the_least_recently_used_answers_are_forgotten_when_there_are_too_many_bytes():
    async def scenario():
        cache, ask = AnswerCache(2 * (ENTRY_BYTES + 1), Metrics()), Asking()
        for key in ("a", "b", "a", "c", "a", "b"):
            known = len(ask.futures)
            asked = asyncio.create_task(cache.get(key, ask))
            await asyncio.sleep(0)
            if len(ask.futures) > known:
                ask.futures[-1].set_result(b"x")
            await asked
        return len(ask.futures)

    assert asyncio.run(scenario()) == 4, "a, b, c, and b again"
