"""Sequences that are read at once: their order, their errors, their end, and how far ahead they are read."""

import threading

import pytest

from embedder.sources.read_ahead import NUM_AHEAD, NUM_WAITING, read_ahead


def of(*values):
    yield from values


def test_values_come_in_the_order_of_the_sequences_however_late_the_first_ones_are():
    second_has_come = threading.Event()

    def first():
        assert second_has_come.wait(30), "the second sequence is read while the first one is"
        yield from (1, 2)

    def second():
        yield 3
        second_has_come.set()
        yield 4

    assert list(read_ahead([first, second, lambda: of(5), of])) == [1, 2, 3, 4, 5]


def test_an_error_comes_after_what_was_read_before_it():
    def failing():
        yield 2
        raise OSError("gone")

    values = read_ahead([lambda: of(1), failing, lambda: of(3)])
    assert [next(values), next(values)] == [1, 2]
    with pytest.raises(OSError, match="gone"):
        next(values)


def test_no_more_is_read_than_may_wait_and_a_reader_that_is_left_stops_its_sequences():
    taken, closed, lock = [0] * 100, [], threading.Lock()

    def endless(number):
        try:
            while True:
                with lock:
                    taken[number] += 1
                yield number
        finally:
            closed.append(number)

    values = read_ahead(lambda number=number: endless(number) for number in range(100))
    assert [next(values) for _ in range(50)] == [0] * 50
    values.close()
    assert sorted(closed) == [number for number in range(100) if taken[number]] and len(closed) <= NUM_AHEAD
    assert max(taken[1:]) <= NUM_WAITING + 1 and taken[0] <= 50 + NUM_WAITING + 1


def test_a_lone_sequence_is_read_by_the_caller():
    thread = []

    def lone():
        thread.append(threading.current_thread())
        yield 1

    assert list(read_ahead([lone])) == [1] and thread == [threading.current_thread()]
    assert list(read_ahead([])) == []
