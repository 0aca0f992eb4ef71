"""Shares of GPUs: placed as Ray places them, in any order, on devices of which none idles."""

import random
from itertools import chain, permutations

import pytest

from embedder.config import load_config
from embedder.placement.fleet import Available
from embedder.placement.gpus import UNITS, devices_needed, part_of_device, share_gpus, whole_units
from embedder.placement.resources import allocate
from shards.plan import PlannedStage
from shards.ranges import LayerRange
from shards.shard_specs import ShardSpec


def placed(actors, num_devices):
    """Room that Ray leaves on each device, in units, once it has placed actors in this order; none where one waits."""
    room = [UNITS] * num_devices
    for num_gpus in actors:
        units = int(num_gpus * UNITS + 0.5)
        while units >= UNITS:
            if UNITS not in room:
                return None
            room[room.index(UNITS)] = 0
            units -= UNITS
        fitting = [each for each in room if each >= units]
        if not fitting:
            return None
        room[room.index(min(fitting))] -= units
    return room


def orders(actors, rng, num=60):
    """Orders in which actors may come up: all of a few, some of many."""
    if len(actors) <= 6:
        return set(permutations(actors))
    return {tuple(rng.sample(actors, len(actors))) for _ in range(num)}


@pytest.mark.parametrize("num_stages", range(1, 7))
@pytest.mark.parametrize("num_gpus", range(9))
def test_all_stages_find_a_place_in_any_order_and_no_device_idles(num_gpus, num_stages):
    config = load_config(overrides={"num_stages": num_stages})
    stages = allocate(config.compute, Available(64, num_gpus)).stages
    shares = [stage.num_gpus for stage in stages]
    if not num_gpus:
        assert {(stage.num_gpus, stage.device) for stage in stages} == {(0, "cpu")}
        return
    assert {stage.device for stage in stages} == {"cuda"}
    assert all(share in {part_of_device(num_parts) for num_parts in range(1, 7)} for share in shares)
    if num_gpus >= num_stages:
        assert shares == [1.0] * num_stages
    for order in orders(shares, random.Random(0)):
        room = placed(order, num_gpus)
        assert room is not None, f"{order} on {num_gpus}"
        assert sum(each < UNITS for each in room) == min(num_gpus, num_stages)
    fewest_together = -(-num_stages // num_gpus)
    assert min(shares) == part_of_device(fewest_together), "no more stages on a device than must be"


@pytest.mark.parametrize("replicas", [(2, 1, 1), (3, 2, 1), (4, 4, 4)])
@pytest.mark.parametrize("num_gpus", range(1, 9))
def test_replicas_find_their_places_too(num_gpus, replicas):
    shares = share_gpus(num_gpus, [], replicas)
    actors = list(chain.from_iterable([share] * number for share, number in zip(shares, replicas, strict=True)))
    assert all(shares)
    for order in orders(actors, random.Random(0)):
        room = placed(order, num_gpus)
        assert room is not None
        # All replicas of a stage reserve the same, so that one device may be left of many.
        assert sum(each < UNITS for each in room) >= min(num_gpus, len(actors)) - 1


def test_the_heaviest_stage_gets_the_device_of_its_own():
    def planned(flops):
        nothing = {"weight_bytes": 0, "flops_per_caption": 0, "cut_bytes_per_image": 0, "cut_bytes_per_caption": 0}
        spec = ShardSpec(LayerRange(0, 1), LayerRange(0, 1))
        return PlannedStage(spec=spec, flops_per_image=flops, **nothing)

    stages = allocate(load_config().compute, Available(8, 2), [planned(flops) for flops in (1, 9, 1)]).stages
    assert [stage.num_gpus for stage in stages] == [0.5, 1.0, 0.5]


def test_what_is_needed_is_never_less_than_any_order_takes():
    """Random mixes of parts and whole devices, beyond those that anybody would write."""
    rng = random.Random(0)
    sizes = [1, 2, 0.5, 0.25, 0.3333, 0.3, 0.4, 0.6, 0.66, 0.7, 0.9, 0.1, 0.1666, 0.34]
    for _ in range(150):
        requests = [(rng.choice(sizes), rng.randint(1, 3)) for _ in range(rng.randint(1, 4))]
        actors = list(chain.from_iterable([num_gpus] * number for num_gpus, number in requests))
        needed = devices_needed(requests)
        taken = []
        for order in orders(actors, rng, 200):
            room = placed(order, 40)
            taken.append(sum(each < UNITS for each in room))
            assert placed(order, needed) is not None, (order, needed)
        assert max(taken) <= needed
        if len(actors) <= 6:
            assert max(taken) == needed, "and no more than the worst order takes"


@pytest.mark.parametrize(
    ("requests", "needed"),
    [
        ([], 0),
        ([(0, 5), (0.5, 0)], 0),
        ([(0.66, 3)], 3),
        ([(0.33, 3)], 1),
        ([(0.5, 2), (0.25, 4)], 2),
        ([(0.5, 1), (0.25, 1), (0.125, 2)], 1),
        ([(1, 2), (0.5, 1)], 3),
        ([(3, 2)], 6),
        ([(0.5, 2), (0.3, 3)], 3),  # 0.5 and 0.3 on one device leave no room for either
        ([(0.5, 100_000), (0.25, 2)], 50_001),
    ],
)
def test_devices_needed(requests, needed):
    assert devices_needed(requests) == needed


def test_mixes_too_large_to_go_through_are_bounded_from_above():
    requests = [(0.5, 40), (0.3, 40), (0.07, 40), (0.11, 30)]
    needed = devices_needed(requests)
    actors = list(chain.from_iterable([num_gpus] * number for num_gpus, number in requests))
    rng = random.Random(0)
    assert all(placed(rng.sample(actors, len(actors)), needed) is not None for _ in range(50))
    assert needed <= len(actors)


def test_shares_are_what_ray_counts_and_never_a_unit_more():
    assert [part_of_device(num_parts) for num_parts in (1, 2, 3, 6, 7)] == [1, 0.5, 0.3333, 0.1666, 0.1428]
    assert [whole_units(share) for share in (1 / 6, 0.3333, 0.1 + 0.2, 2)] == [0.1666, 0.3333, 0.3, 2]
