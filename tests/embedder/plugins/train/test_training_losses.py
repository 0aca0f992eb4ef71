"""Losses against a plain reference, pair by pair; augmentation, schedule and metrics."""

import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch.testing import assert_close

from embedder.plugins.train.trainer.batch import item_key
from embedder.plugins.train.trainer.forward import NUM_DRAWS, augment, draw, kept_tokens
from embedder.plugins.train.trainer.objective import alignment_loss, clip_loss, concept_loss, positives_of, siglip_loss
from embedder.plugins.train.trainer.train_settings import AugmentSettings, TrainSettings, ema_decay_at, learning_rate_at
from embedder.retrieval.rank_metrics import best_ranks, retrieval_at
from shards.ranges import LayerRange

# Three images of two concepts, four captions; the last caption has no image here.
IMAGES, CAPTIONS = torch.tensor([7, 7, 9]), torch.tensor([7, 9, 9, 4])


def logits(seed=0):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)) * 3


def plain_softmax(rows, row_concepts, column_concepts):
    """Mean over rows that have a positive of the mean over its positives of -log p."""
    losses = []
    for row, concept in zip(rows.tolist(), row_concepts.tolist(), strict=True):
        total = sum(math.exp(value) for value in row)
        own = [
            -math.log(math.exp(v) / total) for v, c in zip(row, column_concepts.tolist(), strict=True) if c == concept
        ]
        if own:
            losses.append(sum(own) / len(own))
    return sum(losses) / len(losses)


def test_clip_loss_with_several_positives_is_that_of_a_plain_loop():
    scores = logits()
    expected = (plain_softmax(scores, IMAGES, CAPTIONS) + plain_softmax(scores.T, CAPTIONS, IMAGES)) / 2
    assert clip_loss(scores, positives_of(IMAGES, CAPTIONS)).item() == pytest.approx(expected, rel=1e-5)


def test_clip_loss_with_one_positive_a_row_is_clips_own():
    scores = torch.randn(5, 5, generator=torch.Generator().manual_seed(1))
    place = torch.arange(5)
    cross = torch.nn.functional.cross_entropy
    expected = (cross(scores, place) + cross(scores.T, place)) / 2
    assert_close(clip_loss(scores, positives_of(place, place)), expected)


def test_siglip_loss_is_a_sigmoid_of_each_pair():
    scores = logits()
    expected = 0.0
    for row, concept in zip(scores.tolist(), IMAGES.tolist(), strict=True):
        for value, other in zip(row, CAPTIONS.tolist(), strict=True):
            expected += math.log1p(math.exp(-value if concept == other else value))
    assert siglip_loss(scores, positives_of(IMAGES, CAPTIONS)).item() == pytest.approx(expected / 3, rel=1e-5)


def test_a_batch_without_any_positive_teaches_clip_nothing():
    scores = logits().requires_grad_()
    loss = clip_loss(scores, torch.zeros(3, 4, dtype=torch.bool))
    loss.backward()
    assert loss.item() == 0
    assert scores.grad.eq(0).all()


def test_concept_loss_spreads_its_target_over_all_that_fit():
    scores = logits()
    fits = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
    shares = torch.log_softmax(scores, 1)
    expected = -torch.stack([shares[0, :2].mean(), shares[1, 2], shares[2, [0, 2, 3]].mean()]).mean()
    assert_close(concept_loss(scores, torch.tensor([0, 2, 3]), fits), expected)
    one_hot = torch.eye(4, dtype=torch.bool)[:3]
    assert_close(concept_loss(scores, torch.arange(3)), concept_loss(scores, torch.arange(3), one_hot))


def test_alignment_is_the_cosine_to_the_middle_of_all_that_fits():
    prototypes = torch.eye(3)
    captions = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.6, 0.8]])
    concepts = torch.tensor([0, 1])
    assert_close(alignment_loss(captions, prototypes, concepts, None), torch.tensor((0 + 0.4) / 2))
    fits = torch.tensor([[True, True, False], [False, True, True]])
    half = 0.5**0.5
    assert_close(
        alignment_loss(captions, prototypes, concepts, fits), torch.tensor(((1 - half) + (1 - 1.4 * half)) / 2)
    )


def test_a_target_may_be_shared_unevenly():
    logits, rows, shares = torch.randn(2, 3), torch.eye(3), torch.tensor([[0.7, 0.3, 0.0], [0.0, 0.2, 0.8]])
    expected = -(torch.log_softmax(logits, 1) * shares).sum(1).mean()
    assert_close(concept_loss(logits, torch.tensor([0, 2]), shares), expected)
    towards = torch.nn.functional.normalize(torch.tensor([[0.7, 0.3, 0.0]]), dim=-1)
    assert alignment_loss(towards, rows, torch.tensor([0]), shares[:1]).item() == pytest.approx(0, abs=1e-6)


def test_losses_of_low_precision_scores_are_computed_in_float32():
    low = logits().bfloat16()
    for loss in (clip_loss, siglip_loss):
        assert_close(loss(low, positives_of(IMAGES, CAPTIONS)), loss(low.float(), positives_of(IMAGES, CAPTIONS)))


def test_ties_count_against_the_model():
    same = np.ones((4, 2), np.float32)
    places = np.arange(4)
    assert best_ranks(same, places, same, places).tolist() == [3, 3, 3, 3]
    assert retrieval_at(same, places, same, places) == {1: 0.0, 5: 1.0, 10: 1.0}


def test_vectors_that_are_not_numbers_find_nothing():
    places = np.arange(4)
    broken, images = np.full((4, 2), np.nan, np.float32), np.eye(4, 2, dtype=np.float32)
    assert best_ranks(broken, places, images, places).tolist() == [3, 3, 3, 3]
    one_broken = np.array([[1, 0], [0, 1], [np.nan, 0], [-1, 0]], np.float32)
    assert best_ranks(one_broken, places, one_broken, places).tolist() == [0, 0, 3, 0]


def test_any_image_of_the_concept_counts_and_others_of_it_do_not_stand_in_the_way():
    queries = np.array([[1, 0], [0, 1], [1, 0]], np.float32)
    images = np.array([[0.9, 0.1], [0.8, 0.2], [0.1, 0.9], [0.5, 0.5]], np.float32)
    ranks = best_ranks(queries, np.array([5, 6, 8]), images, np.array([5, 5, 6, 7]))
    assert ranks.tolist() == [0, 0, 4]  # the third concept has no image at all
    assert retrieval_at(queries, np.array([5, 6, 8]), images, np.array([5, 5, 6, 7]), (1,)) == {1: pytest.approx(2 / 3)}


def test_the_rate_rises_then_falls_along_a_cosine_and_stays():
    settings = TrainSettings(learning_rate=1.0, warmup_steps=4, num_steps=12, final_learning_rate=0.1)
    assert [learning_rate_at(step, settings) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert learning_rate_at(4, settings) == 1.0
    assert learning_rate_at(8, settings) == pytest.approx(0.55)
    assert learning_rate_at(12, settings) == learning_rate_at(99, settings) == pytest.approx(0.1)


def test_with_a_cooldown_a_longer_run_begins_like_a_shorter_one():
    short = TrainSettings(learning_rate=1.0, warmup_steps=2, num_steps=10, cooldown_steps=4)
    long = short.model_copy(update={"num_steps": 20})
    rates = [learning_rate_at(step, short) for step in range(11)]
    assert rates[:7] == [learning_rate_at(step, long) for step in range(7)]
    assert rates[2:7] == [1.0] * 5
    assert rates[8] == pytest.approx(0.5)
    assert rates[10] == 0


def test_the_average_forgets_untrained_weights_at_first():
    settings = TrainSettings(ema_decay=0.999)
    assert ema_decay_at(0, settings) == pytest.approx(0.1)
    assert ema_decay_at(10**6, settings) == 0.999
    assert ema_decay_at(0, TrainSettings(ema_decay=0)) == 0


def test_settings_that_contradict_each_other_are_refused():
    for changes, message in (
        ({"what": "layers"}, "ranges of layers go with"),
        ({"vision_layers": LayerRange(0, 1)}, "ranges of layers go with"),
        ({"warmup_steps": 2000}, "exceeds num_steps"),
        ({"loss": "concepts"}, "num_concepts = 0"),
        ({"learning_rate": 0}, "learning_rate"),
        ({"lr": 1}, "lr"),
    ):
        with pytest.raises(ValidationError, match=message):
            TrainSettings(**changes)


STRONG = AugmentSettings(
    rotate_deg=20, scale=0.3, translate=0.2, shear=0.1, flip=0.5, brightness=0.3, contrast=0.3, saturation=0.5, hue=0.1,
    shade=0.3, grey=0.2, erase=0.5,
)  # fmt: skip


def images(num=6):
    return torch.rand(num, 3, 16, 16, generator=torch.Generator().manual_seed(3))


def keys(num=6):
    return torch.tensor([item_key(f"a/{number}.png") for number in range(num)])


def test_what_a_image_becomes_does_not_depend_on_its_neighbours():
    draws = draw(keys(), 1, 2, NUM_DRAWS)
    together = augment(images(), STRONG, draws)
    order = torch.tensor([4, 0, 5])
    assert_close(augment(images()[order], STRONG, draw(keys()[order], 1, 2, NUM_DRAWS)), together[order])
    assert together.min() >= 0
    assert together.max() <= 1
    assert not torch.allclose(together, images())


def test_draws_differ_by_seed_epoch_and_item_and_are_evenly_spread():
    base = draw(keys(), 1, 2, 8)
    assert torch.equal(base, draw(keys(), 1, 2, 8))
    for other in (draw(keys(), 1, 3, 8), draw(keys(), 2, 2, 8), draw(keys().flip(0), 1, 2, 8)):
        assert (base != other).all()
    many = draw(torch.arange(20_000), 0, 0, 4)
    assert many.min() >= 0
    assert many.max() < 1
    assert_close(many.mean(0), torch.full((4,), 0.5), atol=0.01, rtol=0)
    assert torch.corrcoef(many.T).fill_diagonal_(0).abs().max() < 0.03


def test_without_settings_images_stay_and_outside_comes_white():
    assert torch.equal(augment(images(), AugmentSettings(), draw(keys(), 0, 0, NUM_DRAWS)), images())
    moved = augment(torch.zeros(50, 3, 16, 16), AugmentSettings(translate=0.5), draw(torch.arange(50), 0, 0, NUM_DRAWS))
    assert moved.max() == 1
    grey = augment(images(), AugmentSettings(grey=1), draw(keys(), 0, 0, NUM_DRAWS))
    assert_close(grey[:, 0], grey[:, 1], atol=2e-3, rtol=0)


def test_patch_dropout_keeps_the_same_number_of_tokens_everywhere_in_order():
    kept = kept_tokens(draw(keys(), 0, 0, 36), 0.33)
    assert kept.shape == (6, 24)
    assert (kept.diff(dim=1) > 0).all()
    assert kept.unique().numel() > 30


def test_item_keys_are_the_same_on_every_machine():
    assert item_key("noto/1f600") == -2601686809890717490
