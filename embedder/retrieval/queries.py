"""Queries of a search: texts, images or vectors, one or several at once; and its options."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from embedder.errors import ConfigError
from index.errors import RetrievalError
from index.vectors import Floats

Query = str | Sequence[str] | Floats
Image = str | Path | bytes
Images = Image | Sequence[Image]


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


@dataclass(frozen=True)
class QueryBatch:
    """Queries of one kind.

    Attributes:
        kind: of all of them.
        values: Q texts, paths and file contents, or vectors float32 (Q, E).
        is_single: whether one was given, not a list.
    """

    kind: Literal["text", "image", "vector"]
    values: Any
    is_single: bool

    @property
    def names(self) -> list[str]:
        """Names of the queries, for people."""
        if self.kind == "vector":
            return ["" if self.is_single else f"vector {number}" for number in range(len(self.values))]
        return ["an image" if isinstance(value, bytes) else str(value) for value in self.values]


def read_search(
    query: Query | None, image: Images | None, options: SearchOptions | int, keywords: dict[str, Any]
) -> tuple[QueryBatch, SearchOptions]:
    """Bring the queries and options of a search, given in any form, into one.

    Args:
        query: texts or vectors, one or several.
        image: images, one or several.
        options: of the search; a number alone is `k`.
        keywords: fields of `SearchOptions`, over those of `options`.

    Raises:
        ConfigError: an option is out of range or doesn't suit the queries, or there is no query.
        RetrievalError: k is below 1, or an array is neither one vector nor a table of vectors.
        TypeError: there is no option of that name.
    """
    options = read_options(options, keywords)
    queries = read_queries(query, image)
    if options.hybrid and queries.kind != "text":
        raise ConfigError(f"hybrid search ranks by words; search with a text, not with a given {queries.kind}")
    return queries, options


def read_options(options: SearchOptions | int, keywords: dict[str, Any]) -> SearchOptions:
    """Return options with the fields in `keywords` over theirs; a number alone is `k`."""
    return replace(SearchOptions(options) if isinstance(options, int) else options, **keywords)


def read_queries(query: Query | None, image: Images | None) -> QueryBatch:
    """Bring queries of any form into one.

    Raises:
        ConfigError: nothing was given, or both.
        RetrievalError: an array is neither one vector nor a table of vectors.
    """
    if query is None and image is not None:
        if isinstance(image, str | Path | bytes):
            return QueryBatch("image", [image], True)
        return QueryBatch("image", list(image), False)
    if query is None or image is not None:
        raise ConfigError("search with a text or a vector, or with an image (image=...): give one of the two")
    if isinstance(query, str):
        return QueryBatch("text", [query], True)
    if isinstance(query, np.ndarray):
        return _vectors(query)
    several = list(query)
    return QueryBatch("text", several, False) if all(isinstance(each, str) for each in several) else _vectors(several)


def _vectors(values: Any) -> QueryBatch:
    try:
        values = np.asarray(values)
    except ValueError:  # rows of different lengths
        values = np.asarray(values, object)
    if values.ndim not in (1, 2) or values.dtype.kind not in "fiu":
        raise RetrievalError(
            f"query: found {values.dtype} of shape {values.shape}; give one vector (E,), or several (Q, E)"
        )
    return QueryBatch("vector", np.atleast_2d(values.astype(np.float32)), values.ndim == 1)
