"""How the stages of one machine share its cores: each by the work that an item is for it. Pure.

With equal shares the heaviest stage waits for cores while the others, done with their blocks, wait for it, and a core
idles. The kernel gives a process a quarter more for each step of niceness less (Linux `sched_prio_to_weight`).
"""

import math
from collections.abc import Sequence

from shards.plan import PlannedStage

STEP = math.log(1.25)
LEAD = 3  # times what would be even: blocks queue behind the heaviest stage, and no other runs dry
MAX_STEPS = 4  # Ray's workers have 15 of the 19 that there are


def niceness_by_work(stages: Sequence[PlannedStage]) -> tuple[int, ...]:
    """Steps that each stage's processes give way to the heaviest stage's, which are given none."""
    work = [_work(stage) for stage in stages]
    steps = (LEAD * math.log(max(work) / own) / STEP if own else MAX_STEPS for own in work)
    return tuple(min(MAX_STEPS, round(step)) for step in steps)


def _work(stage: PlannedStage) -> float:
    """What an item is for one process: measured seconds, else operations."""
    return (stage.seconds_per_item or stage.flops_per_image + stage.flops_per_caption) / stage.num_replicas
