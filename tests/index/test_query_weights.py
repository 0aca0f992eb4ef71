"""Weights keep the products of queries and vectors, and make short codes exact where queries look."""

import numpy as np
import pytest
from index_samples import make_images_and_captions, make_vectors, unit

from index.query_weights import inverse_weights, query_weights


@pytest.mark.parametrize("num_queries", [0, 3, 500])
@pytest.mark.parametrize("num_groups", [4, 16, 64])
def test_products_stay_as_they_are(num_queries: int, num_groups: int) -> None:
    images, captions = make_images_and_captions(2000, 500)
    weights = query_weights(captions[:num_queries], images, num_groups)
    found = (captions @ inverse_weights(weights).T) @ (images @ weights.T).T
    assert weights.shape == (64, 64)
    np.testing.assert_allclose(found, captions @ images.T, atol=1e-5)


def test_rounding_of_weighted_vectors_harms_the_scores_of_captions_less() -> None:
    images, captions = make_images_and_captions(2000, 500)
    noise = np.random.default_rng(0).standard_normal(images.shape).astype(np.float32)
    weights = query_weights(captions[:250], images, 16)
    weighted = images @ weights.T
    rounded = weighted + 0.1 * weighted.std() * noise
    plain = images + 0.1 * images.std() * noise
    asked = captions[250:]
    exact = asked @ images.T

    def error(scores: np.ndarray) -> float:
        return float(np.sqrt(np.mean((scores - exact) ** 2)))

    assert error((asked @ inverse_weights(weights).T) @ rounded.T) < 0.7 * error(asked @ plain.T)


def test_groups_have_equal_products_of_variances() -> None:
    spread = make_vectors(4000, 32) * np.arange(1, 33) ** -1.0
    images = unit(spread)
    weighted = images @ query_weights(np.empty((0, 32), np.float32), images, 8).T
    products = np.log(weighted.var(axis=0)).reshape(8, 4).sum(axis=1)
    one_after_the_other = np.sort(np.log(weighted.var(axis=0)))[::-1].reshape(8, 4).sum(axis=1)
    assert np.ptp(products) < 0.3 * np.ptp(one_after_the_other)


def test_a_direction_that_neither_queries_nor_vectors_have_does_no_harm() -> None:
    images = make_vectors(500, 16)
    images[:, 3] = 0
    images = unit(images)
    weights = query_weights(images[:100], images, 4)
    assert np.isfinite(weights).all()
    assert np.isfinite(inverse_weights(weights)).all()
