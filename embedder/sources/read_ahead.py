"""Reads several sequences at once in threads; values come in the order of the sequences."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from queue import Empty, Queue
from threading import Event
from typing import Any, TypeVar

T = TypeVar("T")
Begin = Callable[[], Generator[T]]
"""Starts to read a sequence; called in the thread that reads it."""

NUM_AHEAD = 8  # sequences read at once: files of a table, folders of a bucket
NUM_WAITING = 4  # values of each that may wait to be taken
_END = object()


def read_ahead(sequences: Iterable[Begin[T]]) -> Iterator[T]:
    """Yield the values of all sequences, one sequence after the other, while the next ones are read.

    A sequence's error is raised where its next value would have come. `sequences` is consumed lazily, so it may be of
    any length; a single sequence is read in the caller's thread.
    """
    sequences = iter(sequences)
    first = list(islice(sequences, 2))
    if len(first) < 2:
        for begin in first:
            yield from begin()
        return
    is_stopped = Event()
    readers: deque[tuple[Queue[Any], Future[None]]] = deque()
    with ThreadPoolExecutor(NUM_AHEAD, "read-ahead") as threads:

        def start(begin: Begin[T]) -> None:
            waiting: Queue[Any] = Queue(NUM_WAITING)
            readers.append((waiting, threads.submit(_read, begin, waiting, is_stopped)))

        try:
            for begin in (*first, *islice(sequences, NUM_AHEAD - len(first))):
                start(begin)
            while readers:
                waiting, reading = readers[0]
                while (value := waiting.get()) is not _END:
                    yield value
                reading.result()  # raises its error
                readers.popleft()
                for begin in islice(sequences, 1):
                    start(begin)
        finally:
            is_stopped.set()
            for waiting, _ in readers:
                _make_room(waiting)


def _read(begin: Begin[T], waiting: "Queue[Any]", is_stopped: Event) -> None:
    """Read a sequence to its end, which is marked, or until it is stopped."""
    try:
        with closing(begin()) as values:
            for value in values:
                waiting.put(value)
                if is_stopped.is_set():
                    return
    finally:
        waiting.put(_END)


def _make_room(waiting: "Queue[Any]") -> None:
    """Drop what waits, so that a reader that waits for room sees that it is stopped."""
    try:
        while True:
            waiting.get_nowait()
    except Empty:
        pass
