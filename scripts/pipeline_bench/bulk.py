"""Streaming beside bulk-synchronous stages: the same graph on Ray, once as it is, once with all rows kept after each.

    python -m pipeline_bench.bulk streaming|bulk TASK      # one of the two, in a process of its own

Streaming overlaps the steps and holds what is between them, however many items there are. With all rows of a step kept
before the next begins, memory (and, beyond Ray's share of it, the disk) grows with their number.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa

from harness import MIB, run_watched, table
from pipeline_bench.task import SIDES, VECTORS_FOLDER, Task, note_finished, read_finished
from pipeline_bench.vectors import check_equal, read_files

WAYS = ("streaming", "bulk")
NUM_STAGES = 3


def compare_bulk(name: str, task: Task, folder: Path, timeout_s: float) -> dict:
    """Run both, check that their vectors are equal, and print what each took.

    Args:
        name: of the workload.
        task: model and items.
        folder: to make, for the results.
        timeout_s: seconds of one run.

    Returns:
        Of each way seconds from start to end and to the first items, and peak memory of all processes (PSS).
    """
    ways, vectors = {}, {}
    rows = [["", "first s", "whole s", "peak MiB"]]
    for way in WAYS:
        out = folder / way
        out.mkdir(parents=True)
        command = [sys.executable, "-m", "pipeline_bench.bulk", way, replace(task, out=str(out)).to_json()]
        watched = run_watched(command, out, timeout_s)
        vectors[way] = read_files(out)
        first_s = read_finished(out)[0][0] - watched.started_s
        ways[way] = {"whole_s": watched.wall_s, "first_s": first_s, "peak_bytes": watched.peak_bytes}
        rows.append([way, f"{first_s:.1f}", f"{watched.wall_s:.1f}", f"{watched.peak_bytes / MIB:,.0f}"])
    check_equal(vectors)
    print(f"\n{name}, {task.num_items:,} pairs through {NUM_STAGES} stages on Ray\n")
    table(rows)
    return {"workload": name, "num_items": task.num_items} | ways


def run(task: Task, *, keep_all: bool) -> None:
    """Embed all items through the stages, and write their vectors."""
    import ray

    from embedder.executors.job import decode_spec, make_plan, stage_specs
    from embedder.executors.ray_session import cluster, start_ray
    from embedder.pipeline import through_stages
    from embedder.placement.resources import allocate
    from embedder.predictor import BatchPredictor, decode_columns

    start_ray()
    ray.data.DataContext.get_current().enable_progress_bars = False
    predictor = BatchPredictor.from_model(task.model, dtype=task.dtype, num_stages=NUM_STAGES)
    config, model = predictor.config, predictor.model
    plan = make_plan(config.compute, model)
    allocation = allocate(config.compute, cluster(), plan.stages)
    captions = {str(image): image.with_suffix(".txt").read_text(encoding="utf-8") for image in task.images()}
    dataset = ray.data.from_items([{"image": image, "caption": caption} for image, caption in captions.items()])
    decode = partial(decode_columns, spec=decode_spec(config.rows, model), image="image", caption="caption")
    dataset = dataset.map_batches(decode, batch_format="pyarrow", batch_size=None, num_cpus=allocation.decode_cpus)
    dataset = dataset.materialize() if keep_all else dataset
    for spec, resources in zip(stage_specs(config.compute, model, plan, allocation), allocation.stages, strict=True):
        dataset = through_stages(dataset, [spec], replace(allocation, stages=(resources,)))
        dataset = dataset.materialize() if keep_all else dataset
    note = partial(noted, out=task.out)
    dataset = dataset.map_batches(note, batch_format="pyarrow", batch_size=None, num_cpus=allocation.write_cpus)
    dataset.write_parquet(str(Path(task.out) / VECTORS_FOLDER), ray_remote_args={"num_cpus": allocation.write_cpus})
    ray.shutdown()


def noted(table: pa.Table, *, out: str) -> pa.Table:
    """Note when rows came out of the last stage; their ids and vectors."""
    if table.num_rows == 0:
        return table
    note_finished(out, table.num_rows)
    ids = [Path(image).name for image in table["carried:image"].to_pylist()]
    return pa.table({"item_id": ids} | {side: table[side] for side in SIDES})


if __name__ == "__main__":
    run(Task.from_command_line(), keep_all=sys.argv[1] == "bulk")
