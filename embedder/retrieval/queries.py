"""Queries of a search: texts, images or vectors, one or several at once."""

from collections.abc import Sequence
from dataclasses import dataclass
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


def read_queries(query: Query | None, image: Images | None) -> QueryBatch:
    """Bring queries of any form into one.

    Raises:
        ConfigError: nothing was given, or both.
        RetrievalError: an array is neither one vector nor a table of vectors.
    """
    if query is not None and image is None:
        return _texts_or_vectors(query)
    if image is not None and query is None:
        if isinstance(image, str | Path | bytes):
            return QueryBatch("image", [image], True)
        return QueryBatch("image", list(image), False)
    raise ConfigError("search with a text or a vector, or with an image (image=...): give one of the two")


def _texts_or_vectors(query: Query) -> QueryBatch:
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
