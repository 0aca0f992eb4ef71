"""What memory each process of a run held over time, and of which kind each of them was."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import psutil

from embedder.executors.monitor import Identity, PeakMemory
from embedder.placement import hardware
from harness import title

COMMAND, DAEMONS, TASKS, WORKERS, OTHERS = "command", "Ray's daemons", "tasks", "other workers", "others"
STEPS_IN_TASKS = ("decode", "write")
DAEMON_NAMES = ("gcs_server", "raylet", "Agent", "monitor", "dashboard")
TITLE_CHARACTERS = 200


@dataclass(frozen=True)
class Seen:
    """A process as it was last seen: its parent, and its command line or the title that Ray gave it."""

    parent: int
    title: str


class MemoryLooks(PeakMemory):
    """Keeps what every process held at every look.

    Attributes:
        seen: all processes.
        looks: Unix time, and bytes of each process (PSS).
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[Identity, Seen] = {}
        self.looks: list[tuple[float, dict[Identity, int]]] = []

    def _read(self, processes: Iterable[psutil.Process]) -> int:
        held: dict[Identity, int] = {}
        for process in processes:
            try:
                identity = process.pid, process.create_time()
                self.seen[identity] = Seen(process.ppid(), title(process)[:TITLE_CHARACTERS])
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            held[identity] = hardware.pss_bytes([process])
        self.looks.append((time.time(), held))
        return sum(held.values())


def kinds(seen: Mapping[Identity, Seen], calls: Iterable[Mapping[str, Any]], command: int) -> dict[Identity, str]:
    """Of which kind each process was.

    Args:
        seen: all processes.
        calls: measurements of the run's steps, which tell in which process each was.
        command: process id of the command.
    """
    by_pid = {call["pid"]: _kind_of_step(call["step"]) for call in calls} | {command: COMMAND}
    return {identity: _kind(identity, seen, by_pid) for identity in seen}


def _kind_of_step(step: str) -> str:
    """Decode and write tasks share their processes; a stage's loading is the stage's own."""
    return TASKS if step in STEPS_IN_TASKS else step.replace("load", "stage")


def _kind(identity: Identity, seen: Mapping[Identity, Seen], by_pid: Mapping[int, str]) -> str:
    pid, process = identity[0], seen[identity]
    if pid in by_pid:
        return by_pid[pid]
    if by_pid.get(process.parent) == TASKS:  # a decoding child
        return TASKS
    if any(name in process.title for name in DAEMON_NAMES):
        return DAEMONS
    return WORKERS if process.title.startswith("ray::") else OTHERS


def growth_by_kind(
    looks: Sequence[tuple[float, Mapping[Identity, int]]],
    kind_of: Mapping[Identity, str],
    start_s: float,
    stop_s: float,
) -> dict[str, dict[str, int | None]]:
    """What each kind of process held, those of one kind together.

    Args:
        looks: Unix time, and bytes of each process.
        kind_of: of `kinds`.
        start_s: Unix time from which the run was at work.
        stop_s: Unix time until which it was.

    Returns:
        Of each kind the number of processes that there ever were, and their memory in bytes: the medians of the second
        quarter of the time (`early`) and of the last (`late`), None without a look then; and the peak of all looks.
    """
    quarter_s = (stop_s - start_s) / 4
    found = {}
    for kind in sorted(set(kind_of.values())):
        held = [(at_s, sum(size for who, size in look.items() if kind_of[who] == kind)) for at_s, look in looks]
        found[kind] = {
            "num_processes": list(kind_of.values()).count(kind),
            "early": _median_between(held, start_s + quarter_s, start_s + 2 * quarter_s),
            "late": _median_between(held, start_s + 3 * quarter_s, stop_s),
            "peak": max((size for _, size in held), default=0),
        }
    return found


def _median_between(held: Iterable[tuple[float, int]], start_s: float, stop_s: float) -> int | None:
    sizes = [size for at_s, size in held if start_s <= at_s <= stop_s]
    return round(median(sizes)) if sizes else None
