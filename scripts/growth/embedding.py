"""What embedding a number of items takes, in all and of each kind of process."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from corpus import DEMO_MODEL, shipped_pairs, write_pairs
from growth.processes import MemoryLooks, growth_by_kind, kinds
from harness import EMBEDDER, MIB, number, run_watched, table
from pipeline_bench.steady import last_stage_events, read_calls, steady_window

COSTS = ["items", "whole ms/item", "CPU", "steady ms/item", "CPU", "peak MiB"]
KINDS = ["kind of process", "number", "early MiB", "late MiB", "late - early", "peak MiB"]


def embed_items(folder: Path, num_items: int, timeout_s: float) -> dict[str, Any]:
    """Embed the shipped emoji, again and again under other names, on Ray through three stages of the shipped model.

    Returns:
        Wall and CPU milliseconds an item, from the command's start to its end (`whole`), and between a quarter of all
        items and three quarters (`steady`; None in too short a run); the most memory of all processes together, each
        shared page counted once (PSS); and the memory of each kind of process.
    """
    source = write_pairs(folder / "emoji", num_items, shipped_pairs()[:num_items])
    program = [*EMBEDDER, "embed", str(source), "--model", str(DEMO_MODEL), "--store", str(folder / "store")]
    memory = MemoryLooks()
    watched = run_watched([*program, "--engine", "ray", "--json"], folder, timeout_s, peak_memory=memory)
    calls = read_calls(folder / "store")
    shutil.rmtree(folder)
    finished = last_stage_events(calls)
    window = steady_window(finished)
    cpu_s = watched.cpu_use.between(watched.started_s, watched.started_s + watched.wall_s)
    steady_cpu_s = watched.cpu_use.between(window.start_s, window.stop_s) if window else 0.0
    kind_of = kinds(memory.seen, calls, watched.pid)
    return {
        "num_items": num_items,
        "whole_ms": 1e3 * watched.wall_s / num_items,
        "whole_cpu_ms": 1e3 * cpu_s / num_items,
        "steady_ms": 1e3 / window.items_per_s if window else None,
        "steady_cpu_ms": 1e3 * steady_cpu_s / window.num_items if window else None,
        "peak_bytes": max(watched.peak_bytes, json.loads(watched.last_line)["peak_memory_bytes"]),
        "by_kind": growth_by_kind(memory.looks, kind_of, finished[0][0], finished[-1][0]),
    }


def show_costs(runs: Sequence[dict[str, Any]]) -> None:
    """Print one line for each number of items."""
    rows = [COSTS]
    for run in runs:
        times = [run[name] for name in ("whole_ms", "whole_cpu_ms", "steady_ms", "steady_cpu_ms")]
        rows.append([f"{run['num_items']:,}", *(number(ms, 1) for ms in times), number(run["peak_bytes"] / MIB, 0)])
    table(rows)


def show_kinds(run: dict[str, Any]) -> None:
    """Print one line for each kind of process of a run."""
    print(f"\n{run['num_items']:,} items: medians of the second and of the last quarter of the time")
    rows = [KINDS]
    for kind, found in run["by_kind"].items():
        early, late = found["early"], found["late"]
        sizes = (early, late, None if early is None or late is None else late - early, found["peak"])
        shown = [number(None if size is None else size / MIB, 0) for size in sizes]
        rows.append([kind, str(found["num_processes"]), *shown])
    table(rows)
