"""Interface of an accumulator, and what several of them share."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.config_toml.metric_section import MetricConfig

State = dict[str, Any]
"""What is known of some rows, as plain JSON."""
Figures = dict[str, Any]
"""Numbers by name; of a confusion also its matrix."""
Floats = np.ndarray[Any, np.dtype[np.float64]]


class Accumulator(ABC):
    """Figures of one `[[metric]]`. Rows with null in one of its columns count in `num_null` alone."""

    def __init__(self, config: MetricConfig) -> None:
        self.config = config

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the embeddings table that `add` reads."""
        return self.config.columns

    @abstractmethod
    def add(self, rows: pa.Table) -> State:
        """Describe some rows of the embeddings table."""

    @abstractmethod
    def merge(self, first: State, second: State) -> State:
        """Describe the rows of two states together; neither is changed."""

    @abstractmethod
    def figures(self, state: State) -> Figures:
        """Compute the figures of a state."""


def valid_rows(rows: pa.Table, columns: tuple[str, ...]) -> tuple[list[pa.ChunkedArray], int]:
    """Columns without the rows in which one of them is null, and the number of those rows.

    Args:
        rows: of the embeddings table.
        columns: at least one.
    """
    rows = rows.select(list(dict.fromkeys(columns)))
    keep = pc.is_valid(rows[columns[0]])
    for name in columns[1:]:
        keep = pc.and_(keep, pc.is_valid(rows[name]))
    kept = rows.filter(keep)
    return [kept[name] for name in columns], rows.num_rows - kept.num_rows


def as_floats(column: pa.ChunkedArray) -> Floats:
    """Numbers or truth values without nulls as float64 (N,); integers beyond 2**53 are rounded, each by itself."""
    kind = column.type
    if pa.types.is_boolean(kind):
        column = column.cast(pa.uint8())
    return np.asarray(column.cast(pa.float64(), safe=False).to_numpy(), np.float64)


def added_counts(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    """Sum counts by key, in the order of the keys, so that equal counts are equal text."""
    return {key: first.get(key, 0) + second.get(key, 0) for key in sorted({*first, *second})}


def share(part: int, whole: int) -> float | None:
    """Share of a whole; none of nothing."""
    return part / whole if whole else None
