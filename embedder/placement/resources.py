"""Allocation of CPUs, GPUs and CPU priority, and refusal of runs that could not start. Pure.

Ray starts actors first, and they keep what they asked for: a decode or write task that finds no CPU left waits forever,
and so does the run. So all minimum requests together must fit before the first actor starts.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from embedder.config import ComputeSettings
from embedder.config_toml.run_sections import Replicas, StageConfig
from embedder.errors import ConfigError
from embedder.placement.allocation import (
    Allocation,
    ModelResources,
    StageResources,
    place_replicas,
    replica_requests,
    task_request,
)
from embedder.placement.fleet import TOLERANCE, Available, cpu_nodes
from embedder.placement.gpus import devices_needed, share_gpus, whole_units
from embedder.placement.placement import ReplicaRequest, explain_refusal, place
from embedder.quantities import agree, plural
from embedder.servables.packing import ActorGroup
from shards.plan import PlannedStage
from shards.planning.devices import RAY_NAMES

# Write tasks are so cheap that a dozen would run at once when parts come in a burst, each in its own process.
CPUS_PER_WRITER = 4
# A stage is busy whenever it has input, whatever it asked Ray for. On a small machine the requests only need to fit;
# on a large one each stage gets a whole core.
STAGE_SHARE_OF_CPUS = 1 / 8
MODELS_SHARE_OF_CPUS = 1 / 4
"""Largest share of all CPUs that actors of further models reserve; like stages, they are busy if they have input."""
OBJECT_STORE_BYTES = 1 << 30  # Ray's shared memory; more of it would only hide a slow stage
MIN_OBJECT_STORE_BYTES = 512 << 20
RAY_CPU_UNIT = 1e-4  # Ray counts and rounds in these
Lack = Literal["num_cpus", "num_gpus", "node"]

# With equal shares of the cores the heaviest stage waits for cores, then the others, done with their blocks, wait for
# it, and a core idles. The kernel gives a process a quarter more per step of lower niceness (Linux
# `sched_prio_to_weight`).
NICENESS_STEP = math.log(1.25)
NICENESS_LEAD = 3  # times the even share: blocks queue behind the heaviest stage, and no other stage runs dry
MAX_NICENESS = 4  # steps; Ray's workers already have 15 of the 19


def allocate(
    compute: ComputeSettings,
    available: Available,
    planned: Sequence[PlannedStage] = (),
    models: Sequence[ModelResources] = (),
) -> Allocation:
    """Fill in what the configuration leaves out, refuse what could not run, and lower limits that could not be reached.

    `available` is what further `models` leave. Raises `ConfigError` if the requests don't fit; the message says what to
    change.
    """
    allocation = replace(request_resources(compute, available, planned), models=tuple(models))
    check_cpus(allocation, available.num_cpus)  # or Ray would wait forever
    check_gpus(allocation, available)
    check_nodes(allocation, available)
    return growing_within(fill_gpus(compute, allocation, available, planned), available)


def request_resources(
    compute: ComputeSettings, available: Available, planned: Sequence[PlannedStage] = ()
) -> Allocation:
    """Fill in what the configuration leaves out, without checking that it fits."""
    requests = compute.stage or (StageConfig(),) * (len(planned) or compute.num_stages)
    requests = tuple(request.model_copy(update={"device": request.device or compute.device}) for request in requests)
    if planned:
        requests = tuple(_as_planned(request, stage) for request, stage in zip(requests, planned, strict=True))
    gpus = _gpus(requests, available, planned)
    node_ids = cpu_nodes(available, len(requests), sum(stage.weight_bytes for stage in planned))
    pairs = zip(requests, gpus, strict=True)
    on_all_nodes = [request.replicas == "auto" and not num_gpus for request, num_gpus in pairs]
    requests = tuple(
        request.model_copy(update={"replicas": Replicas.of(len(node_ids)) if on_all else replicas_of(request)})
        for request, on_all in zip(requests, on_all_nodes, strict=True)
    )
    num_replicas = sum(replicas_of(request).max for request in requests)
    stages = tuple(
        replace(
            _stage(request, num_gpus, len(requests), num_replicas, available),
            node_ids=tuple(node_ids) if on_all and len(available.nodes) > 1 else (),
        )
        for request, num_gpus, on_all in zip(requests, gpus, on_all_nodes, strict=True)
    )
    return Allocation(
        _with_needs(stages, planned, available) if planned else stages,
        decode_cpus(compute.decode_cpus, available),
        num_writers=max(1, int(available.num_cpus // CPUS_PER_WRITER)),
    )


def _with_needs(
    stages: Sequence[StageResources], planned: Sequence[PlannedStage], available: Available
) -> tuple[StageResources, ...]:
    """Add the types of devices and the memory that the plan's stages need on their nodes."""
    has_memory = all(node.memory_bytes for node in available.nodes)
    return tuple(
        replace(
            stage,
            device_types=types_on_nodes(plan.device, available),
            weight_bytes=plan.weight_bytes if stage.device == "cpu" and has_memory else 0,
        )
        for stage, plan in zip(stages, planned, strict=True)
    )


def model_resources(available: Available, actors: Sequence[ActorGroup]) -> tuple[ModelResources, ...]:
    """Return what the actors of further models reserve of what is available."""
    names = ["[[model]] " + " and ".join(each.name for each in actor.servables) for actor in actors]
    return tuple(
        ModelResources(name, actor.replicas, cpus, actor.num_gpus)
        for name, actor, cpus in zip(names, actors, _model_cpus(available, actors), strict=True)
    )


def beside_models(available: Available, actors: Sequence[ActorGroup]) -> Available:
    """Return what the actors of further models leave to the main model's stages and to the tasks.

    Those with GPUs are subtracted only from the sums: `place_replicas` finds their nodes, together with those of the
    stages. For the others each node gives the same part of its CPUs. Raises `ConfigError` if they ask for more GPUs
    than there are.
    """
    if not actors:
        return available
    num_gpus = devices_needed((actor.num_gpus, actor.replicas) for actor in actors)
    if num_gpus > available.num_devices:
        raise ConfigError(
            f"the further models ask for {plural(num_gpus, 'GPU')} and there "
            f"{agree(available.num_devices, 'is', 'are')} {available.num_devices}: the run would wait for ever; lower "
            "num_gpus or replicas of [[model]]"
        )
    cpus = [(each * actor.replicas, actor) for each, actor in zip(_model_cpus(available, actors), actors, strict=True)]
    num_cpus = sum(each for each, _ in cpus)
    part = 1 - sum(each for each, actor in cpus if not actor.num_gpus) / available.num_cpus
    nodes = tuple(replace(node, num_cpus=node.num_cpus * part) for node in available.nodes)
    return replace(
        available, num_cpus=available.num_cpus - num_cpus, num_gpus=available.num_gpus - num_gpus, nodes=nodes
    )


def without_gpus_of(left: Available, models: Sequence[ModelResources]) -> Available:
    """Return what `beside_models` leaves with nodes that lack the GPUs of further models, placed before any stage.

    Parts of a GPU count as whole ones that they share. The nodes stay as they are if the models find no room on them.
    """
    whole, parts = ([each for each in models if (each.num_gpus < 1) == is_part] for is_part in (False, True))
    num_shared = devices_needed((each.num_gpus, each.replicas) for each in parts)
    cpus = sum(each.num_cpus * each.replicas for each in parts if each.num_gpus) / max(1, num_shared)
    asked = [ReplicaRequest(each.name, each.replicas, each.num_cpus, each.num_gpus) for each in whole]
    asked.append(ReplicaRequest("parts of GPUs", num_shared, cpus, 1.0))
    found = place(left.nodes, asked).nodes or ()
    held = Counter[int]()
    for request, numbers in zip(asked, found, strict=bool(found)):
        for number in numbers:
            held[number] += int(request.num_gpus)
    nodes = (replace(node, num_gpus=node.num_gpus - held[number]) for number, node in enumerate(left.nodes))
    return replace(left, nodes=tuple(nodes))


def _model_cpus(available: Available, actors: Sequence[ActorGroup]) -> list[float]:
    """Return the CPUs that each actor of further models reserves: what it asks for, within a share of all CPUs."""
    wanted = sum(actor.num_cpus * actor.replicas for actor in actors)
    scale = min(1.0, available.num_cpus * MODELS_SHARE_OF_CPUS / wanted) if wanted else 1.0
    cpus = (actor.num_cpus * scale for actor in actors)
    return [math.floor(each) if each >= 1 else int(each / RAY_CPU_UNIT) * RAY_CPU_UNIT for each in cpus]


def decode_cpus(asked: float | None, available: Available) -> float:
    """Return the CPUs that one decode task reserves."""
    return asked or min(1.0, available.max_node_cpus / 2)


def _as_planned(request: StageConfig, stage: PlannedStage) -> StageConfig:
    """Use the plan's replicas, GPUs and threads where the configuration leaves them out."""
    plan: dict[str, object] = {"num_threads": stage.num_threads}
    if request.device == "auto" or (request.device == "cuda" and stage.num_gpus):
        plan["num_gpus"] = stage.num_gpus
    left_out = {name: value for name, value in plan.items() if name not in request.model_fields_set}
    if request.replicas == "auto" and stage.device is not None:
        left_out["replicas"] = Replicas.of(stage.num_replicas)
    return request.model_copy(update=left_out)


def types_on_nodes(device: str | None, available: Available) -> frozenset[str]:
    """Return the types of nodes for a plan's device, as A100-80G for `A100:80GB`; none if no node is of it.

    Where no type has its memory, those that are of another are returned.
    """
    types = {node.device_type for node in available.nodes if node.device_type}
    if device is None:
        return frozenset()
    if device in types:
        return frozenset({device})
    name, _, memory = device.partition(":")
    alike = {each: f"{gb}GB" for each in types for table, gb in [RAY_NAMES.get(each, (each, None))] if table == name}
    return frozenset(each for each, its in alike.items() if its == memory) or frozenset(alike)


def replicas_of(request: StageConfig) -> Replicas:
    """Return the bounds on a stage's replicas; one replica if nothing is known about the fleet."""
    return Replicas() if request.replicas == "auto" else request.replicas


def _gpus(requests: Sequence[StageConfig], available: Available, planned: Sequence[PlannedStage]) -> list[float]:
    """Return the GPUs of a replica of each stage: as asked for, none on the CPU, else a share of the remaining ones."""
    given = {
        index: whole_units(request.num_gpus or 0.0)
        for index, request in enumerate(requests)
        if request.num_gpus is not None or request.device == "cpu"
    }
    niceness = niceness_by_work(planned) if planned else (0,) * len(requests)
    sharing = sorted(set(range(len(requests))) - given.keys(), key=lambda index: (niceness[index], index))
    shares = share_gpus(
        available.num_devices,
        [(num_gpus, replicas_of(requests[index]).min) for index, num_gpus in given.items()],
        [replicas_of(requests[index]).min for index in sharing],
    )
    found = given | dict(zip(sharing, shares, strict=True))
    return [found[index] for index in range(len(requests))]


def _stage(
    request: StageConfig, num_gpus: float, num_stages: int, num_replicas: int, available: Available
) -> StageResources:
    num_cpus, replicas = request.num_cpus, replicas_of(request)
    if num_cpus is None:
        # Grown to their limits, the stages leave half of the CPUs to decoding, even on a node of the smallest kind.
        node_cpus = min((node.num_cpus for node in available.nodes if node.num_cpus), default=available.num_cpus)
        num_cpus = min(1.0, node_cpus * STAGE_SHARE_OF_CPUS, available.num_cpus / 2 / num_replicas)
        num_cpus = max(1, int(num_cpus / RAY_CPU_UNIT)) * RAY_CPU_UNIT  # with none, nothing would limit the replicas
    return StageResources(
        min_replicas=replicas.min,
        max_replicas=replicas.max,
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        num_threads=request.num_threads or _threads(available, num_stages * replicas.min),
        device="cuda" if request.device == "cuda" or (request.device == "auto" and num_gpus > 0) else "cpu",
    )


def _threads(available: Available, num_shares: int) -> int:
    """Return the torch threads of a replica: its share of all CPUs, and no more than its node can have."""
    return max(1, int(min(available.num_cpus // num_shares, available.max_node_cpus)))


def fill_gpus(
    compute: ComputeSettings, allocation: Allocation, available: Available, planned: Sequence[PlannedStage]
) -> Allocation:
    """Add replicas on the remaining GPUs, if their number is left to the run; always to the slowest stage.

    Stages with their own numbers, by the configuration or by the plan, keep them. `allocation` has one replica of each
    other stage.
    """
    work = [_work(stage) for stage in planned] or [1.0] * len(allocation.stages)
    may_grow = [
        stage.num_gpus > 0
        and (not compute.stage or compute.stage[index].replicas == "auto")
        and (not planned or planned[index].device is None)
        for index, stage in enumerate(allocation.stages)
    ]
    while True:
        index = max(range(len(work)), key=lambda each: work[each] / allocation.stages[each].min_replicas)
        grown = _with_replicas(allocation, index, allocation.stages[index].min_replicas + 1)
        if not may_grow[index] or not _fits(grown, available):
            return allocation
        allocation = grown


def _with_replicas(allocation: Allocation, index: int, number: int) -> Allocation:
    stages = list(allocation.stages)
    stages[index] = replace(stages[index], min_replicas=number, max_replicas=number)
    return replace(allocation, stages=tuple(stages))


def _fits(allocation: Allocation, available: Available) -> bool:
    if allocation.min_cpus > available.num_cpus + TOLERANCE:
        return False
    if len(available.nodes) < 2 or available.can_grow:
        return allocation.min_gpus <= available.num_devices
    is_within = _sum_of_gpus(allocation) <= available.num_gpus + TOLERANCE
    return is_within and place_replicas(allocation, available.nodes) is not None


def _sum_of_gpus(allocation: Allocation) -> float:
    return sum(stage.num_gpus * stage.min_replicas for stage in allocation.stages)


def growing_within(allocation: Allocation, available: Available) -> Allocation:
    """Lower `max_replicas` until all stages can have grown, and the largest task still finds its CPUs.

    Ray lets a stage grow into CPUs that no task holds at that moment, and a replica keeps what it holds. Lowering lets
    the same configuration serve a cluster and a laptop. The stage with the most replicas gives one up first.
    """
    while lacking := _lacking(allocation, available):
        can_shrink = [
            index
            for index, stage in enumerate(allocation.stages)
            if stage.max_replicas > stage.min_replicas and (lacking == "node" or getattr(stage, lacking) > 0)
        ]
        if not can_shrink:
            break
        allocation = _shrink(allocation, can_shrink, available, lacking)
    return allocation


def _shrink(allocation: Allocation, indexes: Sequence[int], available: Available, lacking: Lack) -> Allocation:
    """Lower the largest of some stages by one, or all of them at once to the least level that still lacks the same.

    The latter is what many steps by one would come to: limits of a million, to say "as many as possible", are usual.
    """

    def limit(level: int) -> Allocation:
        stages = list(allocation.stages)
        for index in indexes:
            most = max(stages[index].min_replicas, min(stages[index].max_replicas, level))
            stages[index] = replace(stages[index], max_replicas=most)
        return replace(allocation, stages=tuple(stages))

    first = max(indexes, key=lambda index: allocation.stages[index].max_replicas)
    most = allocation.stages[first].max_replicas
    level = bisect_left(range(most), True, key=lambda level: _lacking(limit(level), available) == lacking)
    if level < most:
        return limit(level)
    stages = list(allocation.stages)
    stages[first] = replace(stages[first], max_replicas=most - 1)
    return replace(allocation, stages=tuple(stages))


def _lacking(allocation: Allocation, available: Available) -> Lack | None:
    """Return what does not suffice for all possible replicas; None if everything does."""
    on_nodes = len(available.nodes) > 1 and not available.can_grow
    num_gpus = sum(stage.max_replicas * stage.num_gpus for stage in allocation.stages)  # devices take longer to count
    if not on_nodes and (num_gpus > available.num_devices + TOLERANCE or allocation.max_gpus > available.num_devices):
        return "num_gpus"
    num_cpus = sum(stage.max_replicas * stage.num_cpus for stage in allocation.stages) + allocation.task_cpus
    if num_cpus > available.num_cpus + TOLERANCE:
        return "num_cpus"
    if on_nodes and any(stage.max_replicas > stage.min_replicas for stage in allocation.stages):
        grown = tuple(replace(stage, min_replicas=stage.max_replicas) for stage in allocation.stages)
        return None if place_replicas(replace(allocation, stages=grown), available.nodes) else "node"
    return None


def describe_limits(requests: Sequence[StageConfig], allocation: Allocation) -> str | None:
    """List in a line the stages that can't grow as far as the configuration says; None if all can."""
    pairs = list(zip(requests, allocation.stages, strict=False))
    lowered = [
        f"stage {index} to {plural(stage.max_replicas, 'replica')} instead of {replicas_of(request).max}"
        for index, (request, stage) in enumerate(pairs)
        if stage.max_replicas < replicas_of(request).max
    ]
    if not lowered:
        return None
    return f"the CPUs and GPUs let {', '.join(lowered)} grow: a decode task needs {allocation.decode_cpus:g} CPU too"


def describe_devices(allocation: Allocation, available: Available) -> str | None:
    """List in a line the device of each stage; None if there are only CPUs."""
    if not available.num_devices:
        return None
    stages = [
        f"stage {index} on {stage.device}" + (f" ({stage.num_gpus:g} GPU)" if stage.num_gpus else "")
        for index, stage in enumerate(allocation.stages)
    ]
    return f"{plural(available.num_devices, 'GPU')}: {', '.join(stages)}"


def check_gpus(allocation: Allocation, available: Available) -> None:
    """Refuse actors that find no GPU, or no GPU with room for their part of one.

    Raises `ConfigError` if there are too few GPUs.
    """
    num_devices = available.num_devices
    for index, stage in enumerate(allocation.stages):
        if stage.device == "cuda" and not stage.num_gpus:
            raise ConfigError(
                f'stage {index}: device = "cuda", and no GPU of {num_devices} has room for it: a stage '
                'computes on a GPU that it reserves through Ray; write device = "cpu" or "auto", lower num_gpus of '
                'other stages, or run with engine = "ray" where Ray sees GPUs'
            )
    # On several nodes the run chooses the node of each replica (`check_nodes`); on one, only Ray chooses the device.
    needed = math.ceil(_sum_of_gpus(allocation) - TOLERANCE) if len(available.nodes) > 1 else allocation.min_gpus
    if needed > num_devices:
        actors = " + ".join(f"{stage.min_replicas} x {stage.num_gpus:g}" for stage in allocation.stages)
        raise ConfigError(
            f"stages ({actors}) ask for {plural(needed, 'GPU')} and there {agree(num_devices, 'is', 'are')} "
            f"{num_devices}: each part lies on one device, and the run would wait for ever; lower num_gpus to parts "
            "that share a device (0.5, 0.3333, 0.25), or leave it out, lower replicas.min, write "
            'device = "cpu", or plan for what there is'
        )


def check_cpus(allocation: Allocation, num_cpus: float) -> None:
    """Refuse actors that leave no CPU for a task, with a `ConfigError`."""
    if allocation.min_cpus > num_cpus + TOLERANCE:
        actors = " + ".join(f"{stage.min_replicas} x {stage.num_cpus:g}" for stage in allocation.stages)
        raise ConfigError(
            f"stages ({actors}) and one decode task ({allocation.decode_cpus:g}) ask for {allocation.min_cpus:g} CPUs "
            f"and there are {num_cpus:g}: the run would wait for ever; lower stage.num_cpus (fractions are "
            'allowed), replicas.min or decode.num_cpus, or use engine = "local"'
        )


def check_nodes(allocation: Allocation, available: Available) -> None:
    """Refuse actors and tasks that the nodes of a cluster can't hold, even if their sums suffice.

    Raises `ConfigError` if there is no placement; the message names the request and the nearest node.
    """
    if len(available.nodes) < 2 or available.can_grow:
        return  # the sums are exact, or nodes that are large enough may come
    requests = [*replica_requests(allocation), task_request(allocation)]
    if place_replicas(allocation, available.nodes) is None and place(available.nodes, requests).is_proven:
        raise ConfigError(
            f"{explain_refusal(available.nodes, requests)}: the run would wait for ever; lower num_cpus, num_gpus or "
            "replicas.min of the stages or decode.num_cpus, or add a node that is large enough"
        )


def object_store_bytes(bytes_per_row: int, rows_in_flight: int, most_bytes: int = OBJECT_STORE_BYTES) -> int:
    """Return the shared memory for blocks between the steps; only what the run needs, as Ray fills what it gets."""
    needed = rows_in_flight * bytes_per_row
    return max(MIN_OBJECT_STORE_BYTES, min(most_bytes, needed))


def niceness_by_work(stages: Sequence[PlannedStage]) -> tuple[int, ...]:
    """Return the steps of niceness of each stage's processes: none for the heaviest, more for less work on an item."""
    work = [_work(stage) for stage in stages]
    steps = (NICENESS_LEAD * math.log(max(work) / own) / NICENESS_STEP if own else MAX_NICENESS for own in work)
    return tuple(min(MAX_NICENESS, round(step)) for step in steps)


def _work(stage: PlannedStage) -> float:
    """Return the work on an item for one process: measured seconds, else operations."""
    return (stage.seconds_per_item or stage.flops_per_image + stage.flops_per_caption) / stage.num_replicas
