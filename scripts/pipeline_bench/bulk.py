"""Streaming beside bulk-synchronous stages: the same graph on Ray, once as it is, once with all rows kept after each.

    python -m pipeline_bench.bulk streaming|bulk TASK      # one of the two, in a process of its own

Streaming overlaps the steps and holds what is between them, however many items there are. With all rows of a step kept
before the next begins, memory (and, beyond Ray's share of it, the disk) grows with their number.
"""

import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import pyarrow as pa

from pipeline_bench.task import VECTORS_FOLDER, FinishLog, Task, read_finished
from pipeline_bench.vectors import SIDES, check_equal, read_files
from pipeline_bench.watch import run_watched
from pipeline_bench.workload import Workload
from retrieval_bench.measures import table

WAYS = ("streaming", "bulk")
NUM_STAGES = 3


@dataclass(frozen=True)
class Way:
    """How one of the two went: seconds from start to end, and peak memory of all processes (PSS)."""

    whole_s: float
    first_s: float
    peak_bytes: int


def compare_bulk(workload: Workload, folder: Path, dtype: str, timeout_s: float) -> dict:
    """Run both, and check that their vectors are equal."""
    ways, vectors = {}, {}
    for name in WAYS:
        out = folder / name
        out.mkdir(parents=True)
        task = Task(str(workload.model), str(workload.items), str(out), dtype, workload.num_distinct)
        watched = run_watched([sys.executable, "-m", "pipeline_bench.bulk", name, task.to_json()], out, timeout_s)
        vectors[name] = read_files(out)
        first_s = read_finished(out)[0][0] - watched.started_s
        ways[name] = asdict(Way(watched.wall_s, first_s, watched.peak_bytes))
    check_equal(vectors)
    return {"workload": workload.name, "num_items": workload.num_items} | ways


def show_bulk(found: dict) -> None:
    """Print both."""
    print(f"\n{found['workload']}, {found['num_items']:,} pairs through {NUM_STAGES} stages on Ray\n")
    rows = [["", "first s", "whole s", "peak MiB"]]
    for name in WAYS:
        way = found[name]
        rows.append([name, f"{way['first_s']:.1f}", f"{way['whole_s']:.1f}", f"{way['peak_bytes'] / 2**20:,.0f}"])
    table(rows)


def main() -> None:
    way, task = sys.argv.pop(1), Task.from_command_line()
    run(task, keep_all=way == "bulk")


def run(task: Task, *, keep_all: bool) -> None:
    """Embed all items through the stages, and write their vectors."""
    import ray

    from embedder.engine.job import decode_spec, make_plan, stage_specs
    from embedder.engine.ray_session import cluster, start_ray
    from embedder.engine.resources import allocate
    from embedder.pipeline import through_stages
    from embedder.predictor import BatchPredictor, decode_columns

    start_ray()
    ray.data.DataContext.get_current().enable_progress_bars = False
    predictor = BatchPredictor.from_model(task.model, dtype=task.dtype, num_stages=NUM_STAGES)
    config, model = predictor.config, predictor.model
    plan = make_plan(config, model)
    allocation = allocate(config, cluster(), plan.stages)
    pictures = [str(picture) for picture in task.pictures()]
    dataset = ray.data.from_items([{"image": picture, "caption": caption_of(picture)} for picture in pictures])
    decode = partial(decode_columns, spec=decode_spec(config, model), image="image", caption="caption")
    dataset = dataset.map_batches(decode, batch_format="pyarrow", batch_size=None, num_cpus=allocation.decode_cpus)
    dataset = dataset.materialize() if keep_all else dataset
    for spec, resources in zip(stage_specs(config, model, plan, allocation), allocation.stages, strict=True):
        dataset = through_stages(dataset, [spec], replace(allocation, stages=(resources,)))
        dataset = dataset.materialize() if keep_all else dataset
    note = partial(noted, out=task.out)
    dataset = dataset.map_batches(note, batch_format="pyarrow", batch_size=None, num_cpus=allocation.write_cpus)
    dataset.write_parquet(str(Path(task.out) / VECTORS_FOLDER), ray_remote_args={"num_cpus": allocation.write_cpus})
    ray.shutdown()


def caption_of(picture: str) -> str:
    return Path(picture).with_suffix(".txt").read_text(encoding="utf-8")


def noted(table: pa.Table, *, out: str) -> pa.Table:
    """Note when rows came out of the last stage; their ids and vectors."""
    if table.num_rows == 0:
        return table
    FinishLog(out).note(table.num_rows)
    ids = [Path(picture).name for picture in table["carried:image"].to_pylist()]
    return pa.table({"item_id": ids} | {side: table[side] for side in SIDES})


if __name__ == "__main__":
    main()
