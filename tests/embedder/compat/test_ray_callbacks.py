"""A pool grows and shrinks by demand that lasts, not by the load of one moment."""

import pytest

from embedder.compat import draining

if not draining.STEADY_POOLS.is_there():
    pytest.skip("this Ray has no pools that are held steady", allow_module_level=True)

from embedder.compat.steady_pools import SustainedDemand

STEP_S = 0.25


def granted_at(directions, **durations):
    """Seconds at which a pool would have been scaled, one direction every quarter of a second."""
    demand = SustainedDemand(**durations)
    return [number * STEP_S for number, direction in enumerate(directions) if demand.lasts(direction, number * STEP_S)]


@pytest.mark.parametrize("burst", [1, 2, 8, 12])
def test_a_burst_is_not_followed(burst):
    assert granted_at([0] * 100 + [1] * burst + [0] * 100, grow_after_s=4.0) == []


def test_demand_that_lasts_is_granted_once_and_again_only_after_as_long_again():
    assert granted_at([1] * 50, grow_after_s=4.0) == [4.0, 8.25]


def test_a_free_slot_now_and_then_does_not_hide_that_a_pool_is_short():
    assert granted_at([1, 1, 1, 1, 1, 1, 1, 0] * 4, grow_after_s=4.0) == [4.0]


def test_a_pool_that_is_as_often_short_as_not_stays():
    assert granted_at([1, 0] * 100, grow_after_s=4.0) == []
    assert granted_at([1, -1] * 200, grow_after_s=4.0, shrink_after_s=8.0) == []


def test_a_pool_shrinks_only_after_a_longer_time_than_it_takes_to_grow():
    assert granted_at([-1] * 100, grow_after_s=4.0, shrink_after_s=20.0) == [20.0]


def test_few_looks_at_a_pool_say_as_little_as_a_short_time():
    """The loop was held up: two looks lie four seconds apart, and the first is not of this demand."""
    demand = SustainedDemand(grow_after_s=4.0)
    assert not demand.lasts(0, 0.0)
    assert not demand.lasts(1, 100.0), "nothing is known of the hundred seconds between"


def test_what_was_seen_before_a_pool_changed_does_not_count():
    demand = SustainedDemand(grow_after_s=4.0)
    assert not demand.lasts(1, 0.0)
    demand.forget()
    assert not demand.lasts(1, 4.0)
    assert demand.lasts(1, 8.0)


@pytest.mark.parametrize(("load_s", "expected"), [(1.0, 20.0), (12.0, 36.0)])
def test_a_replica_that_took_long_to_load_stays_the_longer(load_s, expected):
    demand = SustainedDemand()
    demand.note_load(load_s)
    assert next(second for second in range(100) if demand.lasts(-1, float(second))) == expected
