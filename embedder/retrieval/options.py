"""What a search may be asked beside its queries."""

from dataclasses import dataclass

from embedder.errors import ConfigError
from index.errors import RetrievalError


@dataclass(frozen=True)
class SearchOptions:
    """How one search, or a batch of them, is answered.

    Attributes:
        k: how many hits a query gets, where so many exist.
        where: a SQL condition over the columns of the embeddings table; only rows that fulfil it may answer.
        group: one hit a video, its best segment; else each segment is a hit.
        fold: hits whose vectors have at least this cosine with a better hit are folded under it; None folds nothing.
        hybrid: fuse the ranking by vectors with the one by caption words.
        min_score: least cosine of a hit with its query.
    """

    k: int = 10
    where: str | None = None
    group: bool = True
    fold: float | None = None
    hybrid: bool = False
    min_score: float | None = None

    def __post_init__(self) -> None:
        """Refuse what no search can fulfil.

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
