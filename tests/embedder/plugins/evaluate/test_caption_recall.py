"""R@k over a store's own images: the right values on vectors whose ranks are known."""

import numpy as np
import pyarrow as pa
import pytest

from embedder.batch_schema import VECTOR
from embedder.retrieval.caption_recall import caption_recall, text_recall

NUM = 20


def circle(angles):
    """Unit vectors in the plane."""
    return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def table(captions):
    """Images spread over a quarter of a circle, with the given caption vectors (None: no caption)."""
    images = circle(np.linspace(0, np.pi / 2, NUM))
    return pa.table(
        {
            "image_embedding": pa.array(list(images), VECTOR),
            "text_embedding": pa.array([None if caption is None else list(caption) for caption in captions], VECTOR),
        }
    )


def test_captions_that_lie_on_their_images_are_all_found_first():
    found = caption_recall(table(circle(np.linspace(0, np.pi / 2, NUM))))
    assert (found.num_queries, found.recall) == (NUM, {1: 1.0, 5: 1.0, 10: 1.0})


def test_captions_that_point_at_the_first_image_rank_the_others_by_distance():
    found = caption_recall(table(circle(np.zeros(NUM))))
    assert found.recall == {1: 1 / NUM, 5: 5 / NUM, 10: 10 / NUM}


def test_only_chosen_rows_are_queries_and_all_images_are_candidates():
    asks = np.arange(NUM) >= NUM - 2
    found = caption_recall(table(circle(np.zeros(NUM))), "the last two", asks)
    assert (found.queries, found.num_queries, found.recall[10]) == ("the last two", 2, 0.0)


def test_images_without_a_caption_are_candidates_and_no_queries():
    captions = [None] * (NUM - 1) + [circle(np.zeros(1))[0]]
    found = caption_recall(table(captions))
    assert (found.num_queries, found.recall) == (1, {1: 0.0, 5: 0.0, 10: 0.0})


def test_other_texts_are_queries_for_the_images_that_they_belong_to():
    asks = np.arange(NUM) % 2 == 0
    queries = circle(np.linspace(0, np.pi / 2, NUM))[asks]
    found = text_recall(table([None] * NUM), "tags", queries, asks)
    assert found.recall[1] == pytest.approx(1.0)
