"""The queries that an index is made and measured with: real captions, held out; where there are none, something near.

What an index is tuned on decides whom it serves. Vectors of the table find each other with a tenth of the effort that
captions need, for a caption lies off the pictures' distribution.
"""

from dataclasses import dataclass

import numpy as np

from index.vectors import Floats, Rows, VectorTable, check_vectors

MAX_MEASURED = 500
MAX_LEARNED = 4000
SAMPLING_SEED = 1
CAPTIONS = "text"
SAMPLED = "sampled"
TEXT_LIKE = "text-like"


@dataclass(frozen=True)
class RecallQueries:
    """The queries that recall is measured on.

    Attributes:
        vectors: (Q, E).
        kind: what they are: `sampled`, `text-like`, or the name that the caller gave them.
        own_rows: (Q,) row of each query in the table, which no search of it may count; None for queries from outside.
    """

    vectors: Floats
    kind: str
    own_rows: Rows | None = None


@dataclass(frozen=True)
class QuerySets:
    """Queries in two parts that share none.

    Attributes:
        measured: recall is measured on these.
        learned: (L, E); projections are learned from these; empty where there is nothing to learn from.
    """

    measured: RecallQueries
    learned: Floats


def split_queries(table: VectorTable, given: Floats | None, kind: str) -> QuerySets:
    """Measure on every other of the given queries, learn from the rest; where there are none, measure on the table.

    Raises:
        RetrievalError: the given queries have another width, or are not finite or not of unit norm.
    """
    if given is None or len(given) == 0:
        return QuerySets(sampled_queries(table), np.empty((0, table.dim), np.float32))
    check_vectors(given, "queries", dim=table.dim)
    measured = _evenly(given[::2], MAX_MEASURED)
    return QuerySets(RecallQueries(measured, kind), _evenly(given[1::2], MAX_LEARNED))


def sampled_queries(table: VectorTable, num_queries: int = MAX_MEASURED) -> RecallQueries:
    """Take vectors of the table as queries: what somebody asks who searches with a picture."""
    rows = table.sample(num_queries, SAMPLING_SEED)
    return RecallQueries(table.take(rows), SAMPLED, rows)


def text_like_queries(pictures: Floats, texts: Floats) -> Floats:
    """Make queries that lie as texts do, from pictures and any texts of the model's (words of its vocabulary will do).

    A caption differs from its picture in two ways that can be measured without captions: it lies across the gap between
    the modalities (the difference of the two means), and it varies only in the directions in which texts vary.

    Args:
        pictures: (N, E) vectors of the table.
        texts: (T, E) vectors of texts, related to the pictures or not.

    Returns:
        (N, E) float32 of unit norm.

    Source: Liang et al. 2022, "Mind the gap: understanding the modality gap in multi-modal contrastive learning".
    """
    centre_of_texts = texts.mean(axis=0, dtype=np.float64)
    _, strengths, directions = np.linalg.svd(texts - centre_of_texts, full_matrices=False)
    shares = np.cumsum(strengths**2) / max(float(np.sum(strengths**2)), 1e-12)
    kept = directions[: int(np.searchsorted(shares, 0.95)) + 1]
    meaning = (pictures - pictures.mean(axis=0, dtype=np.float64)) @ kept.T @ kept
    spread = np.sqrt(np.sum(strengths**2) / len(texts)) / max(
        float(np.sqrt(np.mean(np.sum(meaning**2, axis=1)))), 1e-12
    )
    made = centre_of_texts + meaning * spread
    unit = made / np.maximum(np.linalg.norm(made, axis=1, keepdims=True), 1e-12)
    return np.asarray(unit, dtype=np.float32)


def _evenly(vectors: Floats, most: int) -> Floats:
    chosen = np.linspace(0, len(vectors) - 1, min(len(vectors), most)).round().astype(np.int64)
    return np.ascontiguousarray(vectors[chosen])
