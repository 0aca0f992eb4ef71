"""Groups of items that look nearly the same: all pairs of vectors, in blocks."""

import numpy as np

from embedder.plugins.serve.listing import describe_items, list_items
from embedder.plugins.serve.served_publication import ServedPublication
from embedder.retrieval.grouping import TOLERANCE
from embedder.retrieval.hit import Hit
from index.vectors import Floats, Rows

MAX_ROWS = 10_000  # 1e8 cosines: a second or two on two cores
MAX_REMEMBERED = 8
BLOCK_ROWS = 1024


def duplicate_groups(publication: ServedPublication, where: str | None, least_cosine: float) -> list[list[Hit]] | None:
    """Group the items that fulfil a condition, the largest group first; None where they are too many.

    Args:
        publication: whose items.
        where: SQL condition, evaluated before; None for all.
        least_cosine: from which on two items are of one group.
    """
    key = (where, least_cosine)
    if key not in publication.duplicates:
        found = _groups(publication, where, least_cosine)
        while len(publication.duplicates) >= MAX_REMEMBERED:
            publication.duplicates.pop(next(iter(publication.duplicates)), None)
        publication.duplicates[key] = found
    groups = publication.duplicates[key]
    if groups is None:
        return None
    hits = iter(describe_items(publication, np.concatenate(groups)) if groups else ())
    return [[next(hits) for _ in group] for group in groups]


def _groups(publication: ServedPublication, where: str | None, least_cosine: float) -> list[Rows] | None:
    snapshot = publication.store.searcher.snapshot
    rows = list_items(publication, where, "oldest", 0)
    places = snapshot.vector_rows[rows].astype(np.int64)
    rows, places = rows[places >= 0], places[places >= 0]
    if len(rows) > MAX_ROWS:
        return None
    groups = group_vectors(snapshot.vectors.vectors(places), least_cosine) if len(rows) else []
    return [rows[group] for group in groups]


def group_vectors(vectors: Floats, least_cosine: float) -> list[Rows]:
    """Group vectors that are near one of their group; those near none are left out.

    Args:
        vectors: float32 (n, E).
        least_cosine: from which on two are near.

    Returns:
        Positions of each group of two or more, rising; the largest group first.
    """
    units = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    groups = np.arange(len(units))  # number of each one's group, the first of its members
    for start in range(0, len(units), BLOCK_ROWS):
        near = units[start : start + BLOCK_ROWS] @ units[start:].T >= least_cosine - TOLERANCE
        for place in np.flatnonzero(near.sum(axis=1) > 1).tolist():
            joined = np.unique(groups[start + np.flatnonzero(near[place])])
            if len(joined) > 1:  # n - 1 times at most
                groups[np.isin(groups, joined)] = joined[0]
    numbers, counts = np.unique(groups, return_counts=True)
    ordered = sorted(zip(-counts[counts > 1], numbers[counts > 1], strict=True))
    return [np.flatnonzero(groups == number) for _, number in ordered]
