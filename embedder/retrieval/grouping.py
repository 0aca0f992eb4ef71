"""Group the segments of each video into one hit, and fold near-duplicates under the best of them."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.retrieval.ranking import Ranking, Scored
from index.vectors import Floats, Rows

ROUNDING = 1e-6  # difference of the same cosine from a search and from the vector
# Rounding error of products of float32 vectors of unit norm; equal vectors should reach a cosine of 1.
TOLERANCE = 1e-6


class ItemRows:
    """Rows of each video."""

    def __init__(self, ids: pa.Table) -> None:
        """Number the items; those with one row, as images have, are not looked up.

        Args:
            ids: `item_id` and `segment` of each row.
        """
        videos = pc.unique(ids["item_id"].filter(pc.greater(ids["segment"], 0)))
        self.has_groups = len(videos) > 0
        if self.has_groups:
            numbers = pc.fill_null(pc.index_in(ids["item_id"], value_set=videos), -1).to_numpy().astype(np.int64)
            # An image's number is its own.
            self._items: Rows = np.where(numbers < 0, len(videos) + np.arange(len(numbers)), numbers)
            self._by_video: Rows = np.flatnonzero(numbers >= 0)
            self._by_video = self._by_video[np.argsort(numbers[self._by_video], kind="stable")]
            self._starts: Rows = np.searchsorted(numbers[self._by_video], np.arange(len(videos) + 1))

    def first_of_each(self, rows: Rows) -> Rows:
        """Positions in `rows` where an item comes up for the first time."""
        if not self.has_groups:
            return np.arange(len(rows))
        _, first = np.unique(self._items[rows], return_index=True)
        positions: Rows = np.sort(first)
        return positions

    def others(self, row: int) -> Rows:
        """Other rows of the video that a row belongs to; none for an image."""
        if not self.has_groups or self._items[row] >= len(self._starts) - 1:
            return np.empty(0, np.int64)
        start, stop = self._starts[self._items[row] :][:2]
        rows = self._by_video[start:stop]
        others: Rows = rows[rows != row]
        return others


def best_segments(hits: Ranking, segments: list[Scored]) -> tuple[Ranking, list[Scored]]:
    """Replace each video's row by its best segment, which an approximate search may have missed.

    Args:
        hits: one row for each video.
        segments: for each hit, the other segments.
    """
    rows, scores, others = hits.rows.copy(), hits.scores.copy(), list(segments)
    for position, (other_rows, other_scores) in enumerate(segments):
        if len(other_rows) and other_scores[0] > scores[position] + ROUNDING:
            behind = int(np.searchsorted(-other_scores, -scores[position]))
            others[position] = (
                np.insert(other_rows, behind, rows[position])[1:],
                np.insert(other_scores, behind, scores[position])[1:],
            )
            rows[position], scores[position] = other_rows[0], other_scores[0]
    return replace(hits, rows=rows, scores=scores), others


def fold(vectors: Floats, least_cosine: float, k: int) -> tuple[Rows, list[Rows]]:
    """Keep the first k vectors that are not near a better kept one, and list the duplicates of each.

    Args:
        vectors: float32 (n, E), best first; an index that rounds gives norms of about 1.
        least_cosine: from which on two vectors are near-duplicates.
        k: most vectors to keep.

    Returns:
        Positions kept, and for each the positions of its duplicates. A vector near several belongs to the best.
    """
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    directions = vectors / np.maximum(norms, np.finfo(np.float32).tiny)
    left = np.arange(len(vectors))
    kept: list[int] = []
    duplicates: list[Rows] = []
    while len(left) and len(kept) < k:
        is_near = directions[left] @ directions[left[0]] >= least_cosine - TOLERANCE
        is_near[0] = True
        kept.append(left[0])
        duplicates.append(left[is_near][1:])
        left = left[~is_near]
    return np.array(kept, np.int64), duplicates
