"""How the time of a build is spent, step by step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StepClock:
    """Measures named steps from its making on; a step that comes again is added up."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._steps_s: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Measure what is done inside the block."""
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
        """Seconds since it was made."""
        return round(time.perf_counter() - self._started, 3)
