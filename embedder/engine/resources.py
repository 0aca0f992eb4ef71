"""Allocation of CPUs, GPUs and CPU priority, and refusal of runs that could not start. Pure: numbers in and out.

Ray starts actors first, and they hold what they asked for: a decode or write task that finds no CPU left waits
forever, and so does the run. So all minimum requests together must fit before the first actor starts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from embedder.config import DecodeConfig, Replicas, RunConfig, StageConfig
from embedder.engine.gpus import devices_needed, share_gpus, whole_units
from embedder.errors import ConfigError
from shards.plan import PlannedStage

WRITE_CPUS = 0.1  # writing waits for the disk, not for the CPU
# So cheap a task would run a dozen times at once where parts come in a burst, each in a process of its own.
CPUS_PER_WRITER = 4
# A stage is busy whenever it has input, whatever it asked Ray for. On a small machine the requests only have to add up;
# on a large one each stage gets a whole core.
STAGE_SHARE_OF_CPUS = 1 / 8
OBJECT_STORE_BYTES = 1 << 30  # Ray's shared memory; more of it would only hide a slow stage
MIN_OBJECT_STORE_BYTES = 512 << 20
BATCHES_IN_FLIGHT = 64
TOLERANCE = 1e-6  # sums of fractions
RAY_CPU_UNIT = 1e-4  # Ray counts in these, and rounds

# With equal shares of the cores the heaviest stage waits for cores while the others, done with their blocks, wait for
# it, and a core idles. The kernel gives a process a quarter more for each step of niceness less (Linux
# `sched_prio_to_weight`).
NICENESS_STEP = math.log(1.25)
NICENESS_LEAD = 3  # times the even share: blocks queue behind the heaviest stage, and no other stage runs dry
MAX_NICENESS = 4  # steps; Ray's workers have 15 of the 19 that there are


@dataclass(frozen=True)
class Available:
    """CPUs and GPUs of the machine or cluster."""

    num_cpus: float
    num_gpus: float = 0.0

    @property
    def num_devices(self) -> int:
        """GPUs, counted whole."""
        return int(self.num_gpus + TOLERANCE)


@dataclass(frozen=True)
class StageResources:
    """Resources that one replica of a stage reserves, and the bounds of their number."""

    min_replicas: int
    max_replicas: int
    num_cpus: float
    num_gpus: float
    num_threads: int
    device: str
    """Of torch: cpu or cuda; Ray shows a replica only the GPU that it reserved."""


@dataclass(frozen=True)
class Allocation:
    """Requests of all actors and tasks of a run."""

    stages: tuple[StageResources, ...]
    decode_cpus: float
    num_writers: int = 1
    write_cpus: float = WRITE_CPUS

    @property
    def min_cpus(self) -> float:
        """CPUs without which the run would hang: those of all actors and of the largest task."""
        return sum(stage.min_replicas * stage.num_cpus for stage in self.stages) + self.task_cpus

    @property
    def task_cpus(self) -> float:
        """CPUs of the largest task."""
        return max(self.decode_cpus, self.write_cpus)

    @property
    def min_gpus(self) -> int:
        """GPUs without which an actor may find no device: each part lies on one device."""
        return devices_needed((stage.num_gpus, stage.min_replicas) for stage in self.stages)

    @property
    def max_gpus(self) -> int:
        """GPUs that all actors take when the stages have grown as far as they may."""
        return devices_needed((stage.num_gpus, stage.max_replicas) for stage in self.stages)


def allocate(config: RunConfig, available: Available, planned: Sequence[PlannedStage] = ()) -> Allocation:
    """Fill in what the configuration leaves out, refuse what could not run, and lower what could not grow.

    Args:
        config: configuration of the run.
        available: CPUs and GPUs of the machine or cluster.
        planned: the plan's stages; their resources fill in first.

    Raises:
        ConfigError: the requests don't fit; the message says what to change.
    """
    allocation = requested(config, available, planned)
    check_cpus(allocation, available.num_cpus)  # or Ray would wait for ever
    check_gpus(allocation, available.num_devices)
    return growing_within(allocation, available)


def requested(config: RunConfig, available: Available, planned: Sequence[PlannedStage] = ()) -> Allocation:
    """Fill in what the configuration leaves out, without a check that it fits.

    Args:
        config: configuration of the run.
        available: CPUs and GPUs of the machine or cluster.
        planned: the plan's stages; their resources fill in first.
    """
    requests = config.stage or (StageConfig(),) * (len(planned) or config.num_stages)
    requests = tuple(request.model_copy(update={"device": request.device or config.device}) for request in requests)
    if planned:
        requests = tuple(_as_planned(request, stage) for request, stage in zip(requests, planned, strict=True))
    num_replicas = sum(request.replicas.max for request in requests)
    stages = tuple(
        _stage(request, num_gpus, len(requests), num_replicas, available)
        for request, num_gpus in zip(requests, _gpus(requests, available, planned), strict=True)
    )
    return Allocation(
        stages, decode_cpus(config.decode, available), num_writers=max(1, int(available.num_cpus // CPUS_PER_WRITER))
    )


def decode_cpus(config: DecodeConfig, available: Available) -> float:
    """Return the CPUs that one decode task reserves."""
    return config.num_cpus or min(1.0, available.num_cpus / 2)


def _as_planned(request: StageConfig, stage: PlannedStage) -> StageConfig:
    """The plan's replicas, GPUs and threads where the configuration leaves them out."""
    plan: dict[str, object] = {"num_threads": stage.num_threads}
    if request.device == "auto" or (request.device == "cuda" and stage.num_gpus):
        plan["num_gpus"] = stage.num_gpus
    if stage.device is not None:
        plan["replicas"] = Replicas(min=stage.num_replicas, max=stage.num_replicas)
    left_out = {name: value for name, value in plan.items() if name not in request.model_fields_set}
    return request.model_copy(update=left_out)


def _gpus(requests: Sequence[StageConfig], available: Available, planned: Sequence[PlannedStage]) -> list[float]:
    """GPUs of a replica of each stage: as asked for, none on the CPU, else a share of what is left of them."""
    given = {
        index: whole_units(request.num_gpus or 0.0)
        for index, request in enumerate(requests)
        if request.num_gpus is not None or request.device == "cpu"
    }
    niceness = niceness_by_work(planned) if planned else (0,) * len(requests)
    sharing = sorted(set(range(len(requests))) - given.keys(), key=lambda index: (niceness[index], index))
    shares = share_gpus(
        available.num_devices,
        [(num_gpus, requests[index].replicas.min) for index, num_gpus in given.items()],
        [requests[index].replicas.min for index in sharing],
    )
    found = given | dict(zip(sharing, shares, strict=True))
    return [found[index] for index in range(len(requests))]


def _stage(
    request: StageConfig, num_gpus: float, num_stages: int, num_replicas: int, available: Available
) -> StageResources:
    num_cpus = request.num_cpus
    if num_cpus is None:
        # Grown as far as they may, the stages leave half of the CPUs to decoding.
        num_cpus = min(1.0, available.num_cpus * STAGE_SHARE_OF_CPUS, available.num_cpus / 2 / num_replicas)
        num_cpus = int(num_cpus / RAY_CPU_UNIT) * RAY_CPU_UNIT
    return StageResources(
        min_replicas=request.replicas.min,
        max_replicas=request.replicas.max,
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        num_threads=request.num_threads or max(1, int(available.num_cpus // (num_stages * request.replicas.min))),
        device="cuda" if request.device == "cuda" or (request.device == "auto" and num_gpus > 0) else "cpu",
    )


def growing_within(allocation: Allocation, available: Available) -> Allocation:
    """Lower `max_replicas` until all stages can have grown, and the largest task still finds its CPUs.

    Ray lets a stage grow into CPUs that no task holds at that moment, and what a replica holds it keeps. So the same
    configuration can serve a cluster and a laptop. The stage with the most replicas gives one up first.
    """
    stages = list(allocation.stages)
    while lacking := _lacking(replace(allocation, stages=tuple(stages)), available):
        can_shrink = [
            index
            for index, stage in enumerate(stages)
            if stage.max_replicas > stage.min_replicas and getattr(stage, lacking) > 0
        ]
        if not can_shrink:
            break
        index = max(can_shrink, key=lambda index: stages[index].max_replicas)
        stages[index] = replace(stages[index], max_replicas=stages[index].max_replicas - 1)
    return replace(allocation, stages=tuple(stages))


def _lacking(allocation: Allocation, available: Available) -> Literal["num_cpus", "num_gpus"] | None:
    """Resource that does not suffice for all replicas that there may be; none where both do."""
    if allocation.max_gpus > available.num_devices:
        return "num_gpus"
    num_cpus = sum(stage.max_replicas * stage.num_cpus for stage in allocation.stages) + allocation.task_cpus
    return "num_cpus" if num_cpus > available.num_cpus + TOLERANCE else None


def describe_limits(config: RunConfig, allocation: Allocation) -> str | None:
    """List in a line the stages that can't grow as far as the configuration says; none where all can."""
    pairs = list(zip(config.stage, allocation.stages, strict=False))
    lowered = [
        f"stage {index} to {stage.max_replicas} instead of {request.replicas.max} replicas"
        for index, (request, stage) in enumerate(pairs)
        if stage.max_replicas < request.replicas.max
    ]
    if not lowered:
        return None
    return f"the CPUs and GPUs let {', '.join(lowered)} grow: a decode task needs {allocation.decode_cpus:g} CPU beside"


def describe_devices(allocation: Allocation, available: Available) -> str | None:
    """List in a line the device of each stage; none where there are only CPUs."""
    if not available.num_devices:
        return None
    stages = [
        f"stage {index} on {stage.device}" + (f" ({stage.num_gpus:g} GPU)" if stage.num_gpus else "")
        for index, stage in enumerate(allocation.stages)
    ]
    return f"{available.num_devices} GPU(s): {', '.join(stages)}"


def check_gpus(allocation: Allocation, num_devices: int) -> None:
    """Refuse actors that find no GPU, or no GPU with room for their part of one.

    Raises:
        ConfigError: there are too few GPUs.
    """
    for index, stage in enumerate(allocation.stages):
        if stage.device == "cuda" and not stage.num_gpus:
            raise ConfigError(
                f'stage {index}: device = "cuda", and none of {num_devices} GPUs has room for it: a stage computes on '
                'a GPU that it reserves through Ray; write device = "cpu" or "auto", lower num_gpus of other stages, '
                'or run with engine = "ray" where Ray sees GPUs'
            )
    if allocation.min_gpus > num_devices:
        actors = " + ".join(f"{stage.min_replicas} x {stage.num_gpus:g}" for stage in allocation.stages)
        raise ConfigError(
            f"stages ({actors}) ask for {allocation.min_gpus} GPUs and there are {num_devices}: each part lies on one "
            "device, and the run would wait for ever; lower num_gpus to parts that share a device (0.5, 0.3333, 0.25), "
            'or leave it out, lower replicas.min, write device = "cpu", or plan for what there is'
        )


def check_cpus(allocation: Allocation, num_cpus: float) -> None:
    """Refuse actors that leave no CPU for a task.

    Raises:
        ConfigError: there are too few CPUs.
    """
    if allocation.min_cpus > num_cpus + TOLERANCE:
        actors = " + ".join(f"{stage.min_replicas} x {stage.num_cpus:g}" for stage in allocation.stages)
        raise ConfigError(
            f"stages ({actors}) and one decode task ({allocation.decode_cpus:g}) ask for {allocation.min_cpus:g} CPUs "
            f"and there are {num_cpus:g}: the run would wait for ever; lower stage.num_cpus (fractions are "
            'allowed), replicas.min or decode.num_cpus, or use engine = "local"'
        )


def object_store_bytes(bytes_per_row: int, rows_per_batch: int) -> int:
    """Return the shared memory for blocks between the steps; Ray fills all that it gets, so it gets what the run needs.

    Args:
        bytes_per_row: bytes of pixels, tokens and activations over all cuts together.
        rows_per_batch: rows that pass through the stages together.
    """
    needed = BATCHES_IN_FLIGHT * rows_per_batch * bytes_per_row
    return max(MIN_OBJECT_STORE_BYTES, min(OBJECT_STORE_BYTES, needed))


def niceness_by_work(stages: Sequence[PlannedStage]) -> tuple[int, ...]:
    """Return the steps of niceness of each stage's processes: none for the heaviest, more for less work on an item."""
    work = [_work(stage) for stage in stages]
    steps = (NICENESS_LEAD * math.log(max(work) / own) / NICENESS_STEP if own else MAX_NICENESS for own in work)
    return tuple(min(MAX_NICENESS, round(step)) for step in steps)


def _work(stage: PlannedStage) -> float:
    """Work on an item for one process: measured seconds, else operations."""
    return (stage.seconds_per_item or stage.flops_per_image + stage.flops_per_caption) / stage.num_replicas
