"""What a user may ask of an index: memory, latency, recall."""

from dataclasses import dataclass

from index.errors import RetrievalError

DEFAULT_RECALL = 0.95
# How long one query may take where nobody says: below it, exact search is the best answer there is.
DEFAULT_LATENCY_MS = 10.0


@dataclass(frozen=True)
class Constraints:
    """Limits that a choice must keep.

    Attributes:
        memory_bytes: the most an index may take in memory, its ids apart; None for no limit.
        latency_ms: the most that one query on one thread may take, the median; where it is given, the smallest index
            that keeps it is chosen, else the fastest one, or exact search where that keeps `DEFAULT_LATENCY_MS`.
        recall: of the exact top ten, the share to find, in (0, 1].

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
        """Up to which latency exact search is taken without looking further."""
        return self.latency_ms if self.latency_ms is not None else DEFAULT_LATENCY_MS
