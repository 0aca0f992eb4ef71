"""Order and draws follow only from seed, epoch and item."""

import numpy as np
import pytest

from embedder.plugins.train.sampler import drawn_captions, epoch_order, is_held_out, num_batches
from embedder.plugins.train.trainer.batch import item_key

KEYS = np.array([item_key(f"item-{number}") for number in range(500)], np.int64)


def test_the_order_does_not_depend_on_the_listing_and_changes_with_seed_and_epoch():
    order = KEYS[epoch_order(KEYS, 0, 0)]
    shuffled = np.random.default_rng(0).permutation(KEYS)
    assert (shuffled[epoch_order(shuffled, 0, 0)] == order).all()
    assert sorted(order) == sorted(KEYS)
    others = [KEYS[epoch_order(KEYS, seed, epoch)] for seed, epoch in ((1, 0), (0, 1), (-1, 0))]
    for other in others:
        assert (other == order).sum() < 10


@pytest.mark.parametrize("seed", [0, 1, 2**40, -5])
def test_every_position_is_as_likely_for_an_item(seed):
    places = np.array([np.flatnonzero(epoch_order(KEYS, seed, epoch) == 0)[0] for epoch in range(200)])
    assert 200 < places.mean() < 300
    assert len(np.unique(places)) > 130


def test_a_concept_is_held_out_whole_and_more_are_held_out_by_a_larger_share():
    concepts = np.repeat(KEYS, 3)
    held_out = is_held_out(concepts, 0.2, seed=1).reshape(-1, 3)
    assert (held_out.all(1) == held_out.any(1)).all()
    assert 0.14 < held_out.mean() < 0.26
    larger = is_held_out(concepts, 0.4, seed=1).reshape(-1, 3)
    assert (larger | ~held_out).all(), "what a smaller share holds out, a larger one does, too"
    assert not is_held_out(KEYS, 0.0, seed=1).any()


def test_captions_are_drawn_without_repetition_and_anew_in_each_epoch():
    draws = [drawn_captions(int(KEYS[0]), 6, 2, seed=0, epoch=epoch) for epoch in range(200)]
    assert all(len(set(draw)) == 2 for draw in draws)
    counts = np.bincount(np.concatenate(draws), minlength=6)
    assert (counts > 40).all()
    assert drawn_captions(int(KEYS[0]), 2, 5, 0, 0) == [0, 1]


def test_batches_are_whole_but_for_a_set_smaller_than_one():
    assert [num_batches(count, 10) for count in (100, 109, 3)] == [10, 10, 1]


def test_one_number_is_scrambled_as_many_are():
    from embedder.plugins.train.sampler import _mix, _state, scramble

    many = scramble(KEYS, 7, 3, 1)
    state = _state(7, 3, 1)
    assert [_mix(state ^ (int(key) & (2**64 - 1))) for key in KEYS[:50]] == many[:50].tolist()
