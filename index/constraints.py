"""Constraints of an index (memory, latency, recall), and the ranking of measured designs within them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from index.index_errors import RetrievalError
from index.manifest import DesignTrial, Point

DEFAULT_RECALL = 0.95
# Query latency up to which exact search is chosen by default: no other result is better.
DEFAULT_LATENCY_MS = 10.0
# Where a latency is given, how many times larger than the smallest index a faster one may be.
LARGER = 2.0
# Times the latency of the fastest: about as fast. The lower one, within which trials distinguish nothing, holds where
# the fastest is wanted and takes less memory than the vectors themselves.
_AS_FAST, _EQUALLY_FAST = 1.25, 1.05
OnMissed = Literal["publish", "keep", "fail"]
"""What to do where no design keeps the constraints: publish the nearest, keep what is published, or fail."""
_LEAST_MISSED = 1e-3  # share of neighbours that may be missed where a recall of 1 is asked for, to compare designs


@dataclass(frozen=True)
class Constraints:
    """Limits that the chosen index must keep; non-positive limits or a recall above 1 raise a RetrievalError.

    `memory_bytes` excludes ids. `latency_ms` is the median of one query on one thread: with it, the fastest index is
    chosen of those that keep it and are at most `LARGER` times as large as the smallest; else the fastest of all, or
    exact search if it keeps `DEFAULT_LATENCY_MS`. Of those about as fast, the smallest is taken. `recall` is of the
    exact top ten.
    """

    memory_bytes: int | None = None
    latency_ms: float | None = None
    recall: float = DEFAULT_RECALL

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "latency_ms"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise RetrievalError(f"index constraint {name} is {value}; give a number above 0, or leave it out")
        if not 0 < self.recall <= 1:
            raise RetrievalError(f"index constraint recall is {self.recall}; give a share above 0 and at most 1")

    @property
    def exact_latency_ms(self) -> float:
        """Latency up to which exact search is chosen without measuring other designs."""
        return self.latency_ms if self.latency_ms is not None else DEFAULT_LATENCY_MS


def rank(trials: Sequence[DesignTrial], constraints: Constraints) -> list[DesignTrial]:
    """Order the trials that keep the constraints, best first; none may.

    Exact search comes first if it is fast enough; then, of those about as fast as the fastest, the smallest: up to a
    quarter slower, or a twentieth where no latency is given and the fastest takes less than the vectors. If a latency
    is given, those at most `LARGER` times as large as the smallest come before others.
    """
    exact = [
        trial for trial in trials if trial.design == "Flat" and keeps(trial, constraints, constraints.exact_latency_ms)
    ]
    fitting = [trial for trial in trials if keeps(trial, constraints, constraints.latency_ms)]

    most_bytes = math.inf
    if constraints.latency_ms is not None:
        most_bytes = LARGER * min((trial.expected_bytes for trial in fitting), default=0)
    small = [
        (trial.expected_latency_ms, trial.expected_bytes) for trial in fitting if trial.expected_bytes <= most_bytes
    ]
    own_bytes = max((trial.expected_bytes for trial in trials if trial.design == "Flat"), default=0)
    least_ms, num_bytes = min(small, default=(0.0, 0))
    is_small = constraints.latency_ms is None and num_bytes < own_bytes
    most_ms = least_ms * (_EQUALLY_FAST if is_small else _AS_FAST)

    def cost(trial: DesignTrial) -> tuple[int, float, float]:
        num_bytes, latency_ms = trial.expected_bytes, trial.expected_latency_ms
        if num_bytes > most_bytes:
            return 2, num_bytes, latency_ms
        return (1, latency_ms, num_bytes) if latency_ms > most_ms else (0, num_bytes, latency_ms)

    return exact + sorted((trial for trial in fitting if trial not in exact), key=cost)


def judge(
    trials: Sequence[DesignTrial], chosen: DesignTrial, constraints: Constraints, missed: Mapping[str, str]
) -> list[DesignTrial]:
    """Set each trial's verdict (chosen or why not), and whether another beats it in everything.

    `missed` says by design what those that were built of the whole table missed.
    """

    def verdict(trial: DesignTrial) -> str:
        if trial == chosen:
            return "chosen"
        if trial.design in missed:
            return f"whole table: {missed[trial.design]}"
        if broken := _list_broken(trial, constraints, constraints.latency_ms):
            return "; ".join(broken)
        if chosen.design == "Flat":
            return "not exact"
        is_slower = constraints.latency_ms is None and trial.expected_latency_ms > chosen.expected_latency_ms
        return "larger" if trial.expected_bytes > chosen.expected_bytes and not is_slower else "slower"

    return [
        trial.model_copy(update={"verdict": verdict(trial), "is_efficient": not _is_beaten(trial, trials)})
        for trial in trials
    ]


def _is_beaten(trial: DesignTrial, others: Sequence[DesignTrial]) -> bool:
    mine = (-trial.recall_at_10, trial.expected_latency_ms, trial.expected_bytes)
    costs = ((-other.recall_at_10, other.expected_latency_ms, other.expected_bytes) for other in others)
    return any(all(a <= b for a, b in zip(cost, mine, strict=True)) and cost != mine for cost in costs)


def keeps(trial: DesignTrial, constraints: Constraints, latency_ms: float | None) -> bool:
    """Whether a trial keeps the constraints' memory and recall, and a latency limit (None for none)."""
    return not _list_broken(trial, constraints, latency_ms)


def _list_broken(trial: DesignTrial, constraints: Constraints, latency_ms: float | None) -> list[str]:
    return _list_limits_broken(_measures(trial), replace(constraints, latency_ms=latency_ms))


Measures = tuple[float, float, int]
"""Recall, milliseconds of a query, bytes in memory."""


def _measures(trial: DesignTrial) -> Measures:
    return trial.recall_at_10, trial.expected_latency_ms, trial.expected_bytes


def _list_limits_broken(measures: Measures, constraints: Constraints) -> list[str]:
    recall, latency_ms, num_bytes = measures
    broken = []
    if recall < constraints.recall:
        broken.append(f"recall {recall:.3f}")
    if constraints.latency_ms is not None and latency_ms > constraints.latency_ms:
        broken.append(f"{latency_ms:.2f} ms")
    if constraints.memory_bytes is not None and num_bytes > constraints.memory_bytes:
        broken.append(f"{num_bytes / 2**20:,.1f} MiB")
    return broken


def excess(measures: Measures, constraints: Constraints) -> tuple[bool, float]:
    """Return how far measures miss the constraints, to compare: whether memory is short, and the largest ratio.

    The ratio is of milliseconds, of bytes, or of the share that isn't found, to what the constraints allow; 1 if all
    are kept.
    """
    recall, latency_ms, num_bytes = measures
    ratios = [1.0, (1 - recall) / max(1 - constraints.recall, _LEAST_MISSED)]
    if constraints.latency_ms is not None:
        ratios.append(latency_ms / constraints.latency_ms)
    memory = 1.0 if constraints.memory_bytes is None else num_bytes / constraints.memory_bytes
    return memory > 1, max(*ratios, memory)


def nearest(trials: Sequence[DesignTrial], constraints: Constraints) -> DesignTrial:
    """Return the trial that misses the constraints by least."""
    return min(trials, key=lambda trial: excess(_measures(trial), constraints))


def no_design_text(trials: Sequence[DesignTrial], constraints: Constraints) -> str:
    """Say that no trial keeps the constraints, and which is the nearest."""
    found = nearest(trials, constraints)
    kept = f"none of {len(trials)} designs keeps" if len(trials) > 1 else "the only design does not keep"
    return (
        f"index: {kept} {_asked_text(constraints)}; the nearest, {found.design}, has recall "
        f"{found.recall_at_10:.3f}, {found.expected_latency_ms:.2f} ms and "
        f"{found.expected_bytes / 2**20:,.1f} MiB: loosen the constraint that it breaks"
    )


def _asked_text(constraints: Constraints) -> str:
    asked = [f"recall = {constraints.recall:g}"]
    if constraints.latency_ms is not None:
        asked.append(f"latency_ms = {constraints.latency_ms:g}")
    if constraints.memory_bytes is not None:
        asked.append(f"memory_bytes = {constraints.memory_bytes} ({constraints.memory_bytes / 2**20:,.1f} MiB)")
    return ", ".join(asked)


def missed_text(point: Point, memory_bytes: int, constraints: Constraints) -> str | None:
    """Say what a whole index misses of the constraints; None if it keeps them."""
    broken = _list_limits_broken((point.recall_at_10, point.latency_ms, memory_bytes), constraints)
    return f"{', '.join(broken)} (asked for: {_asked_text(constraints)})" if broken else None
