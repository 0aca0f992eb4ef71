"""Groups of items that look nearly the same: all pairs of vectors, in blocks."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.retrieval.grouping import TOLERANCE
from embedder.retrieval.hits import Hit
from embedder.serve.listing import describe_items, list_items
from embedder.serve.publications import ServedPublication
from index.vectors import Floats, Rows

MAX_ROWS = 20_000  # 4e8 cosines: some seconds on two cores
BLOCK_ROWS = 1024


def duplicate_groups(publication: ServedPublication, where: str | None, least_cosine: float) -> list[list[Hit]] | None:
    """Group the items that fulfil a condition, the largest group first; None where they are too many.

    Args:
        publication: whose items.
        where: SQL condition, evaluated before; None for all.
        least_cosine: from which on two items are of one group.
    """
    snapshot = publication.store.searcher.snapshot
    rows = list_items(publication, where, "oldest", 0)
    places = snapshot.vector_rows[rows].astype(np.int64)
    rows, places = rows[places >= 0], places[places >= 0]
    if len(rows) > MAX_ROWS:
        return None
    groups = group_vectors(snapshot.vectors.vectors(places), least_cosine) if len(rows) else []
    hits = iter(describe_items(publication, rows[np.concatenate(groups)]) if groups else ())
    return [[next(hits) for _ in group] for group in groups]


def group_vectors(vectors: Floats, least_cosine: float) -> list[Rows]:
    """Group vectors that are near one of their group; those near none are left out.

    Args:
        vectors: float32 (n, E).
        least_cosine: from which on two are near.

    Returns:
        Positions of each group of two or more, rising; the largest group first.
    """
    units = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    leaders = np.arange(len(units))
    for start in range(0, len(units), BLOCK_ROWS):
        near = units[start : start + BLOCK_ROWS] @ units[start:].T >= least_cosine - TOLERANCE
        for one, other in zip(*np.nonzero(np.triu(near, 1)), strict=True):
            _join(leaders, start + int(one), start + int(other))
    numbers = pa.array([_leader(leaders, place) for place in range(len(units))])
    counts = {each["values"]: each["counts"] for each in pc.value_counts(numbers).to_pylist() if each["counts"] > 1}
    ordered = sorted(counts, key=lambda leader: (-counts[leader], leader))
    found = numbers.to_numpy()
    return [np.flatnonzero(found == leader) for leader in ordered]


def _leader(leaders: Rows, place: int) -> int:
    while leaders[place] != place:
        leaders[place] = leaders[leaders[place]]
        place = int(leaders[place])
    return place


def _join(leaders: Rows, one: int, other: int) -> None:
    first, second = sorted((_leader(leaders, one), _leader(leaders, other)))
    leaders[second] = first
