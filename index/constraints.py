"""Constraints of an index: memory, latency, recall."""

from dataclasses import dataclass

from index.errors import RetrievalError

DEFAULT_RECALL = 0.95
# Latency of one query up to which exact search is taken by default: no other result is better.
DEFAULT_LATENCY_MS = 10.0


@dataclass(frozen=True)
class Constraints:
    """Limits that the chosen index must keep.

    Attributes:
        memory_bytes: the most memory of an index, without its ids; None for no limit.
        latency_ms: the most milliseconds of one query on one thread, the median; where it is given, the smallest index
            that keeps it is chosen, else the fastest one, or exact search where that keeps `DEFAULT_LATENCY_MS`.
        recall: the share of the exact top ten to find, in (0, 1].

    Raises:
        RetrievalError: a limit is not positive, or the recall above 1.
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
        """Latency up to which exact search is taken without measuring other designs."""
        return self.latency_ms if self.latency_ms is not None else DEFAULT_LATENCY_MS
