"""Packing of servables into actors: consecutive small ones share one. Considers only memory; independent of Ray."""

from collections.abc import Sequence
from dataclasses import dataclass

from embedder.servables.servable import Servable

DECODE_PART = 0.25  # of the CPUs, so that decoding and reading continue next to the actors


@dataclass(frozen=True)
class ActorGroup:
    """Servables of one pool of actors, in their order, and what each actor reserves."""

    servables: tuple[Servable, ...]
    memory_bytes: int
    num_cpus: float
    num_gpus: float
    replicas: int

    @property
    def num_threads(self) -> int:
        """Threads of each servable; they take turns."""
        return max(1, int(max(each.num_cpus for each in self.servables)))


def pack_servables(ordered: Sequence[Servable], room_bytes: int) -> list[ActorGroup]:
    """Put consecutive servables into one actor as long as they fit into its memory.

    Only those with the same GPUs and number of replicas share one; each part of a split servable gets its own actor.
    `ordered` is the result of `embedder.servables.order.order_servables`; `room_bytes` is the memory of one actor,
    which a single servable may exceed. Raises `ServableError` if a file is missing.
    """
    groups: list[ActorGroup] = []
    for servable in (part for each in ordered for part in each.parts()):
        alone = ActorGroup((servable,), servable.size_bytes(), servable.num_cpus, servable.num_gpus, servable.replicas)
        last = groups[-1] if groups else None
        if last is not None and _may_join(last, alone, room_bytes):
            groups[-1] = ActorGroup(
                (*last.servables, servable),
                last.memory_bytes + alone.memory_bytes,
                max(last.num_cpus, alone.num_cpus),
                last.num_gpus,
                last.replicas,
            )
        else:
            groups.append(alone)
    return groups


def _may_join(group: ActorGroup, alone: ActorGroup, room_bytes: int) -> bool:
    same = (group.num_gpus, group.replicas) == (alone.num_gpus, alone.replicas)
    is_cut = any(each.is_part for each in (*group.servables, *alone.servables))
    return same and not is_cut and group.memory_bytes + alone.memory_bytes <= room_bytes


def reserved_cpus(groups: Sequence[ActorGroup], num_cpus: float) -> tuple[float, list[float]]:
    """Return the CPUs that decoding reserves, and those of an actor of each group; scaled down if there are not enough.

    Ray starts nothing without a free CPU, so all actors and at least one decode task must fit at once.
    """
    wanted = sum(group.num_cpus * group.replicas for group in groups)
    decode = min(1.0, num_cpus * DECODE_PART)
    scale = min(1.0, (num_cpus - decode) / wanted)
    return decode, [_fitting(group.num_cpus * scale) for group in groups]


def _fitting(num_cpus: float) -> float:
    """Round down to Ray's granularity: ten thousandths below one, whole numbers above."""
    return float(int(num_cpus)) if num_cpus >= 1 else max(1e-4, int(num_cpus * 1e4) / 1e4)
