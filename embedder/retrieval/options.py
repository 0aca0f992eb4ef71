"""Options of a search."""

from dataclasses import dataclass

from embedder.errors import ConfigError
from index.errors import RetrievalError


@dataclass(frozen=True)
class SearchOptions:
    """Options of `Store.search`, for one query or a batch of them.

    Attributes:
        k: hits of each query, where that many exist.
        where: SQL condition over the columns of `Store.to_arrow()` but the vectors, as `"price < 10"`; only rows that
            fulfil it are found, and k of them wherever k exist.
        group: one hit for each video, its best segment, with the others in `Hit.segments`; else a hit for each segment.
        fold: cosine, as 0.98, from which on a hit is folded under a better one; None folds nothing.
        hybrid: fuse the ranking by vectors with the one by the words of captions; for texts only.
        min_score: least cosine of a hit with its query.
    """

    k: int = 10
    where: str | None = None
    group: bool = True
    fold: float | None = None
    hybrid: bool = False
    min_score: float | None = None

    def __post_init__(self) -> None:
        """Refuse options out of range.

        Raises:
            RetrievalError: k is below 1.
            ConfigError: another option is out of its range.
        """
        if self.k < 1:
            raise RetrievalError(f"k is {self.k}; ask for 1 result or more")
        if self.where is not None and not self.where.strip():
            raise ConfigError(f"where {self.where!r}: it is empty; write a condition, or leave it out")
        if self.fold is not None and not 0 < self.fold <= 1:
            raise ConfigError(f"fold is {self.fold}; give a cosine above 0 and up to 1, as 0.98")
        if self.min_score is not None and not -1 <= self.min_score <= 1:
            raise ConfigError(f"the minimum score is {self.min_score}; give a cosine between -1 and 1, as 0.2")
