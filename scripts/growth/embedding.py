"""What embedding so many items takes, in all and of each kind of process."""

import json
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from growth.processes import Growth, MemoryLooks, growth_by_kind, kinds
from pipeline_bench.contestants import read_calls
from pipeline_bench.steady import Window, last_stage_events, steady_window
from pipeline_bench.watch import Watched, run_watched
from pipeline_bench.workload import Workload, small_on_emoji


@dataclass(frozen=True)
class Embedding:
    """One run of the command.

    Attributes:
        num_items: pairs of a picture and its caption.
        whole_ms: wall milliseconds an item, from the command's start to its end.
        whole_cpu_ms: CPU milliseconds an item of all processes, likewise.
        steady_ms: wall milliseconds an item between a quarter of all items and three quarters; None in too short a run.
        steady_cpu_ms: CPU milliseconds an item, likewise.
        peak_bytes: the most memory of all processes together, each shared page counted once (PSS).
        by_kind: the memory of each kind of process.
    """

    num_items: int
    whole_ms: float
    whole_cpu_ms: float
    steady_ms: float | None
    steady_cpu_ms: float | None
    peak_bytes: int
    by_kind: dict[str, Growth]

    def to_json(self) -> dict[str, Any]:
        """All figures."""
        return asdict(self)


def embed_items(folder: Path, num_items: int, timeout_s: float) -> Embedding:
    """Embed the shipped emoji, again and again under other names, on Ray through three stages of the shipped model.

    Raises:
        ContestantFailed: the command did, or took too long.
    """
    folder.mkdir(parents=True)
    workload = small_on_emoji(folder, num_items)
    memory = MemoryLooks()
    watched = run_watched(command(workload, folder / "store"), folder, timeout_s, memory)
    found = summed_up(watched, memory, read_calls(folder / "store"), num_items)
    shutil.rmtree(folder)
    return found


def command(workload: Workload, store: Path) -> list[str]:
    """The command line."""
    program = [sys.executable, "-m", "embedder", "embed", str(workload.items), "--model", str(workload.model)]
    return [*program, "--store", str(store), "--engine", "ray", "--json"]


def summed_up(watched: Watched, memory: MemoryLooks, calls: list[dict[str, Any]], num_items: int) -> Embedding:
    """From what was seen to figures an item and a kind of process."""
    finished = last_stage_events(calls)
    window = steady_window(finished)
    cpu_s = watched.cpu_use.between(watched.started_s, watched.started_s + watched.wall_s)
    kind_of = kinds(memory.seen, calls, watched.pid)
    report = json.loads(watched.last_line)
    return Embedding(
        num_items=num_items,
        whole_ms=1e3 * watched.wall_s / num_items,
        whole_cpu_ms=1e3 * cpu_s / num_items,
        steady_ms=1e3 / window.items_per_s if window else None,
        steady_cpu_ms=_steady_cpu_ms(watched, window),
        peak_bytes=max(watched.peak_bytes, report["peak_memory_bytes"]),
        by_kind=growth_by_kind(memory.looks, kind_of, finished[0][0], finished[-1][0]),
    )


def _steady_cpu_ms(watched: Watched, window: Window | None) -> float | None:
    return 1e3 * watched.cpu_use.between(window.start_s, window.stop_s) / window.num_items if window else None
