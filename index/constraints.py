"""Constraints of an index (memory, latency, recall), and the ranking of measured designs within them."""

from collections.abc import Sequence
from dataclasses import dataclass

from index.index_errors import RetrievalError
from index.manifest import DesignTrial, Point

DEFAULT_RECALL = 0.95
# Query latency up to which exact search is chosen by default: no other result is better.
DEFAULT_LATENCY_MS = 10.0


@dataclass(frozen=True)
class Constraints:
    """Limits that the chosen index must keep; non-positive limits or a recall above 1 raise a RetrievalError.

    `memory_bytes` excludes ids. `latency_ms` is the median of one query on one thread: with it, the smallest index that
    keeps it is chosen; else the fastest, or exact search if it keeps `DEFAULT_LATENCY_MS`. `recall` is of the exact top
    ten.
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
    """Order the trials that keep the constraints, best first; raises a RetrievalError if none does.

    Exact search comes first if it is fast enough; then the smallest index if a latency is given, else the fastest.
    """
    exact = [
        trial for trial in trials if trial.design == "Flat" and keeps(trial, constraints, constraints.exact_latency_ms)
    ]
    fitting = [trial for trial in trials if keeps(trial, constraints, constraints.latency_ms)]
    if not fitting:
        raise RetrievalError(_no_design(trials, constraints))

    def cost(trial: DesignTrial) -> tuple[float, float]:
        costs = (trial.expected_bytes, trial.expected_latency_ms)
        return costs if constraints.latency_ms is not None else (costs[1], costs[0])

    return exact + sorted((trial for trial in fitting if trial not in exact), key=cost)


def judge(trials: Sequence[DesignTrial], ranked: Sequence[DesignTrial], constraints: Constraints) -> list[DesignTrial]:
    """Set each trial's verdict (chosen or why not), and whether another beats it in everything."""

    def verdict(trial: DesignTrial) -> str:
        if trial == ranked[0]:
            return "chosen"
        if broken := _list_broken(trial, constraints, constraints.latency_ms):
            return "; ".join(broken)
        if ranked[0].design == "Flat":
            return "not exact"
        return "larger" if constraints.latency_ms is not None else "slower"

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
    broken = []
    if trial.recall_at_10 < constraints.recall:
        broken.append(f"recall {trial.recall_at_10:.3f}")
    if latency_ms is not None and trial.expected_latency_ms > latency_ms:
        broken.append(f"{trial.expected_latency_ms:.2f} ms")
    if constraints.memory_bytes is not None and trial.expected_bytes > constraints.memory_bytes:
        broken.append(f"{trial.expected_bytes / 2**20:,.1f} MiB")
    return broken


def _no_design(trials: Sequence[DesignTrial], constraints: Constraints) -> str:
    nearest = min(trials, key=lambda trial: len(_list_broken(trial, constraints, constraints.latency_ms)))
    asked = [f"recall = {constraints.recall:g}"]
    if constraints.latency_ms is not None:
        asked.append(f"latency_ms = {constraints.latency_ms:g}")
    if constraints.memory_bytes is not None:
        asked.append(f"memory_bytes = {constraints.memory_bytes} ({constraints.memory_bytes / 2**20:,.1f} MiB)")
    kept = f"none of {len(trials)} designs keeps" if len(trials) > 1 else "the only design does not keep"
    return (
        f"index: {kept} {', '.join(asked)}; the nearest, {nearest.design}, has recall "
        f"{nearest.recall_at_10:.3f}, {nearest.expected_latency_ms:.2f} ms and "
        f"{nearest.expected_bytes / 2**20:,.1f} MiB: loosen the constraint that it breaks"
    )


def point_keeps(point: Point, memory_bytes: int, constraints: Constraints) -> bool:
    """Whether a whole index keeps the constraints."""
    return (
        point.recall_at_10 >= constraints.recall
        and (constraints.latency_ms is None or point.latency_ms <= constraints.latency_ms)
        and (constraints.memory_bytes is None or memory_bytes <= constraints.memory_bytes)
    )
