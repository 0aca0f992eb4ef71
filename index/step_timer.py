"""Timer of the steps of a build."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StepTimer:
    """Timer of named steps; the times of a repeated step are added up."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._steps_s: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Measure the block as part of a step."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._steps_s[name] = self._steps_s.get(name, 0.0) + time.perf_counter() - started

    @property
    def steps_s(self) -> dict[str, float]:
        """Seconds of each step."""
        return {name: round(seconds, 3) for name, seconds in self._steps_s.items()}

    @property
    def total_s(self) -> float:
        """Seconds since the timer was made."""
        return round(time.perf_counter() - self._started, 3)
