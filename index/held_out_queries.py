"""Queries that tune and measure an index: held-out captions, or a substitute if there are none.

An index must be tuned on queries like the real ones: vectors of the table find each other with a tenth of the search
parameters that captions need, because captions lie off the images' distribution.
"""

from dataclasses import dataclass

import numpy as np

from index.vectors import Floats, Rows, VectorTable, check_vectors

MAX_MEASURED = 500
_LEAST_APART = 400  # given queries; of fewer, those that search parameters are chosen by judge them, too
MAX_LEARNED = 4000
SAMPLING_SEED = 1
CAPTIONS = "text"
SAMPLED = "sampled"
TEXT_LIKE = "text-like"


@dataclass(frozen=True)
class RecallQueries:
    """Queries (Q, E) to measure recall on; their `kind` is `sampled`, `text-like`, or the caller's name.

    `own_rows` (Q,) has each query's row in the table, not its own neighbour; None for external queries.
    """

    vectors: Floats
    kind: str
    own_rows: Rows | None = None


@dataclass(frozen=True)
class SplitQueries:
    """Queries by use: to choose designs and search parameters, to judge those, and (L, E) to learn projections from."""

    tuned: RecallQueries
    judged: RecallQueries
    learned: Floats


def split_queries(table: VectorTable, given: Floats | None, kind: str) -> SplitQueries:
    """Split the given queries: a half to learn from (possibly none), a quarter to tune with, a quarter to judge.

    Of fewer than 400, the same half tunes and judges. Without given queries (None or empty), vectors of the table do
    both. Raises a RetrievalError if the given queries have another width, or are not finite or not of unit norm.
    """
    if given is None or len(given) == 0:
        sampled = sampled_queries(table)
        return SplitQueries(sampled, sampled, np.empty((0, table.dim), np.float32))
    check_vectors(given, "queries", dim=table.dim)
    learned = _evenly(given[1::2], MAX_LEARNED)
    if len(given) < _LEAST_APART:
        measured = RecallQueries(_evenly(given[::2], MAX_MEASURED), kind)
        return SplitQueries(measured, measured, learned)
    tuned, judged = (RecallQueries(_evenly(given[first::4], MAX_MEASURED), kind) for first in (0, 2))
    return SplitQueries(tuned, judged, learned)


def sampled_queries(table: VectorTable, num_queries: int = MAX_MEASURED) -> RecallQueries:
    """Sample vectors of the table as queries, as in a search by image."""
    rows = table.sample(num_queries, SAMPLING_SEED)
    return RecallQueries(table.take(rows), SAMPLED, rows)


def text_like_queries(images: Floats, texts: Floats) -> Floats:
    """Make queries distributed like captions, from image vectors (N, E) and any text vectors (T, E).

    The result is (N, E) float32 of unit norm; words of the model's vocabulary will do as texts. A caption differs from
    its image in two ways that can be measured without captions: it lies across the gap between the modalities (the
    difference of the two means), and it varies only in the directions in which texts vary.

    Source: Liang et al. 2022, "Mind the gap: understanding the modality gap in multi-modal contrastive learning".
    """
    centre_of_texts = texts.mean(axis=0, dtype=np.float64)
    _, strengths, directions = np.linalg.svd(texts - centre_of_texts, full_matrices=False)
    shares = np.cumsum(strengths**2) / max(float(np.sum(strengths**2)), 1e-12)
    kept = directions[: int(np.searchsorted(shares, 0.95)) + 1]
    meaning = (images - images.mean(axis=0, dtype=np.float64)) @ kept.T @ kept
    spread = np.sqrt(np.sum(strengths**2) / len(texts)) / max(
        float(np.sqrt(np.mean(np.sum(meaning**2, axis=1)))), 1e-12
    )
    made = centre_of_texts + meaning * spread
    unit = made / np.maximum(np.linalg.norm(made, axis=1, keepdims=True), 1e-12)
    return np.asarray(unit, dtype=np.float32)


def _evenly(vectors: Floats, most: int) -> Floats:
    chosen = np.linspace(0, len(vectors) - 1, min(len(vectors), most)).round().astype(np.int64)
    return np.ascontiguousarray(vectors[chosen])
