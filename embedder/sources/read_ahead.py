"""Reads several sequences at once in threads; values come in the order of the sequences."""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T")
Begin = Callable[[], Generator[T]]
"""Starts to read a sequence; called in the thread that reads it."""

NUM_AHEAD = 8  # sequences read at once: files of a table, folders of a bucket
NUM_WAITING = 4  # values of each that may wait to be taken


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
    readers: deque[_Reader[T]] = deque()
    with ThreadPoolExecutor(NUM_AHEAD, "read-ahead") as threads:

        def start(begin: Begin[T]) -> None:
            readers.append(_Reader(begin))
            threads.submit(readers[-1].run)

        try:
            for begin in (*first, *islice(sequences, NUM_AHEAD - len(first))):
                start(begin)
            while readers:
                yield from readers[0].values()
                readers.popleft()
                for begin in islice(sequences, 1):
                    start(begin)
        finally:
            for reader in readers:
                reader.stop()


class _Reader(Generic[T]):
    """A sequence that one thread reads and another consumes."""

    def __init__(self, begin: Begin[T]) -> None:
        self._begin, self._waiting = begin, deque[T]()
        self._change = threading.Condition()
        self._is_stopped = self._has_ended = False
        self._error: BaseException | None = None

    def run(self) -> None:
        """Read to the end, or until `stop`."""
        try:
            with closing(self._begin()) as values:
                for value in values:
                    if not self._put(value):
                        break
        except BaseException as error:  # noqa: BLE001 (raised again by the thread that takes)
            self._error = error
        with self._change:
            self._has_ended = True
            self._change.notify_all()

    def _put(self, value: T) -> bool:
        with self._change:
            self._change.wait_for(lambda: self._is_stopped or len(self._waiting) < NUM_WAITING)
            self._waiting.append(value)
            self._change.notify_all()
            return not self._is_stopped

    def values(self) -> Iterator[T]:
        """Yield the values in order; raises the reading thread's error, if any."""
        while True:
            with self._change:
                self._change.wait_for(lambda: self._has_ended or len(self._waiting) > 0)
                if not self._waiting:
                    break
                value = self._waiting.popleft()
                self._change.notify_all()
            yield value
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Tell the thread to end before its sequence does."""
        with self._change:
            self._is_stopped = True
            self._change.notify_all()
