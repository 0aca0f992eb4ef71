"""From rows to hits: one look into the table for all that a query's hits tell."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from embedder.retrieval.hit import Duplicate, Hit, Segment
from embedder.retrieval.ranking import Ranking, Scored
from embedder.retrieval.row_metadata import RowMetadata

Rows = np.ndarray[Any, np.dtype[np.int64]]

NO_ROWS: Scored = (np.empty(0, np.int64), np.empty(0, np.float32))


def describe_hits(
    catalogue: RowMetadata,
    catalogue_rows: Rows,
    hits: Ranking,
    segments: Sequence[Scored],
    duplicates: Sequence[Ranking],
) -> list[Hit]:
    """Hits with their descriptions.

    Args:
        catalogue: what the table says.
        catalogue_rows: its row for each row of the index.
        hits: one place a hit.
        segments: for each hit, the other segments of its video.
        duplicates: for each hit, what was folded under it; may be empty where nothing was to be folded.
    """
    folded = [(each.rows, each.scores) for each in duplicates] or [NO_ROWS] * len(segments)
    wanted = np.concatenate([hits.rows, *(rows for rows, _ in [*segments, *folded])])
    described = iter(catalogue.describe(catalogue_rows[wanted]))
    own = [next(described) for _ in hits.rows]
    segment_lists = [
        [Segment(row["start_s"], row["end_s"], score) for row, score in _scored(described, each)] for each in segments
    ]
    duplicate_lists = [[Duplicate(row["item_id"], score) for row, score in _scored(described, each)] for each in folded]
    return [
        Hit(
            score=float(hits.scores[place]),
            segments=segment_lists[place],
            duplicates=duplicate_lists[place],
            rank_score=None if hits.rank_scores is None else float(hits.rank_scores[place]),
            words_rank=None if hits.words_ranks is None else int(hits.words_ranks[place]) or None,
            **description,
        )
        for place, description in enumerate(own)
    ]


def _scored(described: Iterator[dict[str, Any]], scored: Scored) -> Iterator[tuple[dict[str, Any], float]]:
    """The next descriptions, as many as there are scores."""
    for score in scored[1].tolist():
        yield next(described), score
