"""One search result."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Segment(NamedTuple):
    """Another stretch of the same video, in seconds from its start, and its cosine with the query."""

    start_s: float | None
    end_s: float | None
    score: float


class Duplicate(NamedTuple):
    """An item that looks nearly like a better hit, and its cosine with the query."""

    item_id: str
    score: float


@dataclass(frozen=True)
class Hit:
    """One picture or video that was found, or one segment of a video.

    Attributes:
        score: cosine with the query, in [-1, 1].
        segments: of a video, the other segments that may answer, best first; empty where each is a hit of its own.
        duplicates: the hits that were folded under this one, best first.
        rank_score: in hybrid search, what the hits are ordered by: the fused ranks, 1/61 + 1/61 at most.
        words_rank: in hybrid search, the place among the captions that hold the query's words, from 1; None where it
            holds none of them.
    """

    score: float
    item_id: str
    segment: int
    modality: str
    uri: str
    start_s: float | None
    end_s: float | None
    caption: str | None
    carryover: dict[str, Any]
    segments: list[Segment] = field(default_factory=list)
    duplicates: list[Duplicate] = field(default_factory=list)
    rank_score: float | None = None
    words_rank: int | None = None

    @property
    def middle_s(self) -> float | None:
        """Middle of a video's segment, in seconds from its start; none for a picture."""
        return None if self.start_s is None or self.end_s is None else (self.start_s + self.end_s) / 2
