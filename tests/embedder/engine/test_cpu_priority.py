from dataclasses import replace

from embedder.engine.cpu_priority import MAX_STEPS, niceness_by_work
from shards.plan import PlannedStage, ShardSpec
from shards.ranges import LayerRange

ONE = PlannedStage(ShardSpec(LayerRange(0, 1), LayerRange(0, 1)), 1, 1e6, 0.0, 0, 0)


def stages(*seconds, num_replicas=1):
    return [replace(ONE, seconds_per_item=each, num_replicas=num_replicas) for each in seconds]


def test_equal_stages_share_equally():
    assert niceness_by_work([ONE, ONE, ONE]) == (0, 0, 0)
    assert niceness_by_work(stages(1.0, 1.01)) == (0, 0)


def test_the_heaviest_gives_way_to_none_and_the_others_the_more_the_less_they_do():
    first, second, third = niceness_by_work(stages(1.0, 0.93, 0.8))
    assert first == 0 < second < third <= MAX_STEPS


def test_steps_are_bounded():
    assert niceness_by_work(stages(1.0, 1e-9)) == (0, MAX_STEPS)
    assert niceness_by_work([ONE, replace(ONE, flops_per_image=0.0)]) == (0, MAX_STEPS)


def test_replicas_share_the_work_of_their_stage():
    halved = replace(ONE, seconds_per_item=2.0, num_replicas=2)
    assert niceness_by_work([halved, *stages(1.0)]) == (0, 0)


def test_operations_stand_in_for_seconds():
    assert niceness_by_work([replace(ONE, flops_per_caption=1e6), ONE]) == (0, MAX_STEPS)
