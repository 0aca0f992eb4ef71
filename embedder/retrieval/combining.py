"""Vectors of queries with several parts: a text and an image together, and examples to stay away from.

    q = sum of weight_p p / s(p)  -  not_weight * mean of n / s(n),  of unit norm

over the parts p that are searched with and the examples n. s(v) is the standard deviation of the cosines of v with
vectors of the store. In a model whose texts and images lie apart (the modality gap), cosines with an image may differ
several times as much as those with a text, and in a plain sum the image alone would decide the order. Divided by their
deviations, parts of equal weight move the ranking equally.

Source: Rocchio 1971, "Relevance feedback in information retrieval", for the mean of the examples and its sign; Liang et
al. 2022, "Mind the gap: understanding the modality gap in multi-modal contrastive learning".
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from embedder.errors import ConfigError
from index.vectors import Floats, Mask

EXAMPLE_COSINE = 0.995
"""From which on a vector counts as the example itself: one computed in bfloat16 is off by less than 0.001."""
MIN_SPREAD = 1e-6  # of vectors that are all the same, or a single one
MIN_NORM = 1e-3  # of a sum, as a share of its terms' norms; what is left below it is rounding


def combine(wanted: Sequence[tuple[float, Floats]], away: Floats | None, not_weight: float, sample: Floats) -> Floats:
    """Combine the parts of Q queries.

    Args:
        wanted: weight and vectors (Q, E) of each part that is searched with.
        away: (N, E), examples that all queries stay away from; None for none.
        not_weight: of all examples together.
        sample: (S, E), vectors of the store.

    Returns:
        float32 (Q, E), of unit norm.

    Raises:
        ConfigError: the parts of a query cancel each other out.
    """
    terms = [weight * vectors / cosine_deviation(vectors, sample)[:, None] for weight, vectors in wanted]
    if away is not None:
        terms.append(-not_weight * np.mean(away / cosine_deviation(away, sample)[:, None], axis=0, keepdims=True))
    total = np.sum(np.broadcast_arrays(*terms), axis=0)
    norms = np.linalg.norm(total, axis=1, keepdims=True)
    if (norms <= MIN_NORM * sum(np.linalg.norm(term, axis=1, keepdims=True) for term in terms)).any():
        raise ConfigError(
            "the query and what it stays away from cancel each other out; search with something else, or give a "
            "smaller not_weight"
        )
    return np.asarray(total / norms, np.float32)


def cosine_deviation(vectors: Floats, sample: Floats) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Compute the standard deviation of each vector's cosines with a sample of the store, float64 (n,).

    Args:
        vectors: (n, E).
        sample: (S, E); of fewer than two all deviations are 1.
    """
    if len(sample) < 2:
        return np.ones(len(vectors))
    # One by one, as a product of matrices gives other last bits to a vector in a batch than to it alone.
    found = np.array([(sample @ vector).std(dtype=np.float64) for vector in vectors])
    return np.where(found < MIN_SPREAD, 1.0, found)


def is_apart(vectors: Floats, away: Floats) -> Mask:
    """Whether each vector is another than all examples; bool (n,).

    Args:
        vectors: (n, E); an index that rounds gives norms of about 1.
        away: (N, E), of unit norm.
    """
    norms = np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    apart: Mask = ((vectors / norms) @ away.T < EXAMPLE_COSINE).all(axis=1)
    return apart
