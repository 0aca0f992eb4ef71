"""Who takes part, and with which settings."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import embedder
from embedder.store.files import StoreFiles
from embedder.store.journal import read_entries
from embedder.store.runs import all_runs
from pipeline_bench.contest import Contestant, Result
from pipeline_bench.steady import last_stage_events
from pipeline_bench.task import Task, read_finished
from pipeline_bench.tuning import Settings
from pipeline_bench.vectors import from_table, read_files
from pipeline_bench.workload import Workload

LIMIT, LIMIT_PROCESSES, LOOP = "limit", "limit, processes", "loop"
RAY_FP32, RAY_DATA, DAFT = "Ray Data, fp32", "Ray Data", "Daft"
STAGES = {1: "ray, 1 stage", 2: "ray, 2 stages", 3: "ray, 3 stages"}
LOCAL, AUTO = "local", "auto"
KEYS = {
    "limit": LIMIT,
    "processes": LIMIT_PROCESSES,
    "loop": LOOP,
    "ray1": STAGES[1],
    "ray2": STAGES[2],
    "ray3": STAGES[3],
    "local": LOCAL,
    "auto": AUTO,
    "raydata32": RAY_FP32,
    "raydata": RAY_DATA,
    "daft": DAFT,
}
"""What `--only` takes -> the name in the table."""


@dataclass(frozen=True)
class Setup:
    """What the contestants of one workload share.

    Attributes:
        workload: model and items.
        dtype: compute dtype of all but the one in fp32.
        num_cores: of this machine.
        settings: what tuning found best for the limit and for the loop.
        daft_python: interpreter that has Daft; None leaves Daft out.
        options: further `--set key=value` of the pipeline's own runs.
    """

    workload: Workload
    dtype: str
    num_cores: int
    settings: Settings
    daft_python: str | None = None
    options: tuple[str, ...] = ()


def contestants(setup: Setup, keys: Sequence[str]) -> list[Contestant]:
    """The chosen ones, in the order of `KEYS`; the first is what the others' vectors are compared with."""
    makers = _makers(setup)
    chosen = [KEYS[key] for key in KEYS if key in keys]
    return [makers[name] for name in chosen if name in makers]


def _makers(setup: Setup) -> dict[str, Contestant]:
    limit, loop = setup.settings.limit, setup.settings.loop
    task = Task(
        model=str(setup.workload.model),
        items=str(setup.workload.items),
        out="",
        dtype=setup.dtype,
        num_distinct=setup.workload.num_distinct,
        batch_size=limit.batch_size,
        num_threads=limit.num_threads,
    )
    one_thread_each = replace(task, num_threads=1, num_workers=setup.num_cores)
    loop_task = replace(task, **asdict(loop))
    actor = replace(task, num_threads=setup.num_cores)
    found = [
        _process(LIMIT, "limit", task),
        _process(LIMIT_PROCESSES, "limit", one_thread_each),
        _process(LOOP, "loop", loop_task),
        *(_pipeline(name, setup, "ray", number) for number, name in STAGES.items()),
        _pipeline(LOCAL, setup, "local", 1),
        _pipeline(AUTO, setup, "auto", 3),
        _process(RAY_FP32, "ray_data", replace(actor, dtype="float32")),
        _process(RAY_DATA, "ray_data", actor),
    ]
    if setup.daft_python:
        found.append(_process(DAFT, "daft_udf", actor, setup.daft_python))
    return {contestant.name: contestant for contestant in found}


def _process(name: str, module: str, task: Task, python: str = sys.executable) -> Contestant:
    """A contestant of this benchmark's own, which notes what it finishes and writes files of vectors."""

    def command(out: Path) -> Sequence[str]:
        return [python, "-m", f"pipeline_bench.{module}", replace(task, out=str(out)).to_json()]

    return Contestant(name, command, lambda out: Result(read_finished(out), read_files(out)))


def _pipeline(name: str, setup: Setup, engine: str, num_stages: int) -> Contestant:
    """The pipeline, by its command line."""
    options = [f"num_stages={num_stages}", *setup.options]

    def command(out: Path) -> Sequence[str]:
        source, model = str(setup.workload.items), str(setup.workload.model)
        fixed = ["--model", model, "--store", str(out / "store"), "--engine", engine, "--dtype", setup.dtype]
        settings = [text for option in options for text in ("--set", option)]
        return [sys.executable, "-m", "embedder", "embed", source, *fixed, *settings, "--json"]

    return Contestant(name, command, read_store)


def read_store(out: Path) -> Result:
    """What the pipeline published, and what its journal measured."""
    calls = read_calls(out / "store")
    table = embedder.open_store(out / "store").to_arrow()
    return Result(last_stage_events(calls), from_table(table), [call for call in calls if "load" not in call["step"]])


def read_calls(store: Path) -> list[dict[str, Any]]:
    """What the only run of a store measured of its steps."""
    files = StoreFiles(str(store))
    (run,) = all_runs(files)
    return [call for entry in read_entries(files, run.run_id) for call in entry.trace]
