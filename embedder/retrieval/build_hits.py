"""Build hits of ranked rows, with one lookup in the table for each query."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from embedder.retrieval.hit import Duplicate, Hit, Segment
from embedder.retrieval.ranking import Ranking, Scored
from embedder.retrieval.row_metadata import RowMetadata
from index.vectors import Rows

NO_ROWS: Scored = (np.empty(0, np.int64), np.empty(0, np.float32))


def describe_hits(
    metadata: RowMetadata,
    metadata_rows: Rows,
    hits: Ranking,
    segments: Sequence[Scored],
    duplicates: Sequence[Ranking],
) -> list[Hit]:
    """Build the hits of one query.

    Args:
        metadata: columns of the table.
        metadata_rows: its row for each row of the index.
        hits: one row for each hit.
        segments: for each hit, the other segments of its video.
        duplicates: for each hit, the rows folded under it; may be empty where nothing was to be folded.
    """
    folded = [(each.rows, each.scores) for each in duplicates] or [NO_ROWS] * len(segments)
    wanted = np.concatenate([hits.rows, *(rows for rows, _ in [*segments, *folded])])
    described = iter(metadata.describe(metadata_rows[wanted]))
    own = [next(described) for _ in hits.rows]
    segment_lists = [
        [Segment(row["start_s"], row["end_s"], score) for row, score in _scored(described, each)] for each in segments
    ]
    duplicate_lists = [[Duplicate(row["item_id"], score) for row, score in _scored(described, each)] for each in folded]
    return [
        Hit(
            score=float(hits.scores[position]),
            segments=segment_lists[position],
            duplicates=duplicate_lists[position],
            rank_score=None if hits.rank_scores is None else float(hits.rank_scores[position]),
            words_rank=None if hits.words_ranks is None else int(hits.words_ranks[position]) or None,
            **description,
        )
        for position, description in enumerate(own)
    ]


def _scored(described: Iterator[dict[str, Any]], scored: Scored) -> Iterator[tuple[dict[str, Any], float]]:
    """Next descriptions, one for each score."""
    for score in scored[1].tolist():
        yield next(described), score
