"""Who takes part, and with which settings."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness import EMBEDDER
from pipeline_bench.task import Task
from pipeline_bench.tuning import Settings

NAMES = {
    "limit": "limit",
    "processes": "limit, processes",
    "loop": "loop",
    "library": "library loop",
    "ray1": "ray, 1 stage",
    "ray2": "ray, 2 stages",
    "ray3": "ray, 3 stages",
    "local": "local",
    "auto": "auto",
    "raydata32": "Ray Data, fp32",
    "raydata": "Ray Data",
    "daft": "Daft",
}
"""What `--only` takes -> the name in the table."""

PIPELINES = {"ray1": ("ray", 1), "ray2": ("ray", 2), "ray3": ("ray", 3), "local": ("local", 1), "auto": ("auto", 3)}
"""Of the pipeline's own runs, engine and number of stages."""


@dataclass(frozen=True)
class Contestant:
    """Who takes part."""

    name: str  # for the table
    # command: the command line that embeds all items and leaves its results in a folder
    command: Callable[[Path], Sequence[str]]
    has_store: bool = False  # whether the results are a store, instead of files of vectors
    checkout: Path | None = None  # whose product runs; None for this one's


def contestants(task: Task, settings: Settings, options: argparse.Namespace, num_cores: int) -> list[Contestant]:
    """The chosen ones, in the order of `NAMES`; the first is what the others' vectors are compared with."""
    processes = _processes(task, settings, num_cores)
    chosen = []
    for key, name in NAMES.items():
        if key not in options.only.split(",") or (key == "daft" and options.daft is None):
            continue
        if key not in processes and key not in PIPELINES:
            continue
        if key in processes:
            python = options.daft if key == "daft" else sys.executable
            chosen.append(Contestant(name, _process_command(*processes[key], python)))
            continue
        command = _pipeline_command(task, *PIPELINES[key], options.set)
        chosen.append(Contestant(name, command, has_store=True))
        for checkout in options.beside:
            chosen.append(Contestant(f"{name} of {checkout.name}", command, has_store=True, checkout=checkout))
    return chosen


def _processes(task: Task, settings: Settings, num_cores: int) -> dict[str, tuple[str, Task]]:
    """Modules of this benchmark's own, and their tasks.

    A library's checkpoint is embedded by that library's loop alone: the others decode as this project's models do.
    """
    if task.checkpoint:
        return {"library": ("library", replace(task, **settings["library"]))}
    limit = replace(task, **settings["limit"])
    actor = replace(limit, num_threads=num_cores)
    return {
        "limit": ("plain limit", limit),
        "processes": ("plain limit", replace(limit, num_threads=1, num_workers=num_cores)),
        "loop": ("plain loop", replace(task, **settings["loop"])),
        "raydata32": ("ray_data", replace(actor, dtype="float32")),
        "raydata": ("ray_data", actor),
        "daft": ("daft_udf", actor),
    }


def _process_command(module: str, task: Task, python: str) -> Callable[[Path], Sequence[str]]:
    """A contestant of this benchmark's own, which notes what it finishes and writes files of vectors."""
    module, *way = module.split()
    return lambda out: [python, "-m", f"pipeline_bench.{module}", *way, replace(task, out=str(out)).to_json()]


def _pipeline_command(
    task: Task, engine: str, num_stages: int, options: Sequence[str]
) -> Callable[[Path], Sequence[str]]:
    settings = [text for option in (f"num_stages={num_stages}", *options) for text in ("--set", option)]
    fixed = ["--model", task.model, "--engine", engine, "--dtype", task.dtype, *settings, "--json"]
    return lambda out: [*EMBEDDER, "embed", task.items, "--store", str(out / "store"), *fixed]
