"""How well the stages of a run use one GPU, compared with what a user would do by hand.

    python scripts/bench_gpu.py                                # some minutes on one GPU; ViT-B/32, random weights
    python scripts/bench_gpu.py --model vit-l-14 --dtype bfloat16 --photographs DIR --compile
    python scripts/bench_gpu.py --model FOLDER --stages 1,2,3,4    # a model of one's own: only the stages
    python scripts/bench_gpu.py --device cpu --seconds 2       # shows on the demo's model that the script runs
    python scripts/bench_gpu.py --simulated H100 [--model vit-l-14|vit-b-32|so400m-384]   # only shapes, on no GPU

docs/gpus-and-clusters.md says what is measured: what the library and a loop by hand do, runs from the same files, then
random rows, so that no decoding binds, and the whole model in one shard whose input is on the device already. For
each number of stages: rows/s on Ray from when all have computed to when the first has run dry; the part of that time in
which none computed; and the most memory. What was not measured is a dash, or null. The last line is one JSON document.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray.data
import torch
from gpu_simulation import (
    CAUSES,
    H100,
    MODELS,
    TITLES,
    blocks_before,
    caption_lengths,
    forward_rate,
    rows_of,
    simulate_stages,
    write_config,
)
from gpu_yardsticks import BATCHES, MIN_CALLS, Files, call_rate, forward_rates, loop_rate, make_library, run_from_files
from published_models import PUBLISHED
from tokenizers import Tokenizer

from corpus import DEMO_MODEL, read_photographs, shipped_pairs, write_pairs
from embedder.compat import fast_start
from embedder.config import RunConfig, load_config
from embedder.executors.job import make_plan, ray_store_bytes, stage_specs
from embedder.executors.ray_session import ray_session
from embedder.models.model_folder import Model, open_model
from embedder.pipeline import through_stages
from embedder.placement.device_settings import settings_of
from embedder.placement.hardware import num_cpus
from embedder.placement.resources import allocate
from embedder.planning.profile_machine import group_costs_here
from embedder.steps.compiled_shard import CompiledShard
from embedder.steps.stage import INPUTS, cuda_problem
from embedder.store.environment import RepeatingThread
from harness import number, table
from shards.activations import Batch, TowerState
from shards.fresh import init_model
from shards.model_config import ModelConfig
from shards.plan import plan_placement
from shards.planning.devices import DEVICES, GPU_CALLS, GPU_ROWS
from shards.planning.planning_costs import DataMix, HostCosts, estimate_costs
from shards.planning.problem import make_problem
from shards.shard import load_shard
from shards.shard_specs import whole_model

CAPTION_TOKENS, CPU_ROWS, WARM_CALLS = 16, 64, 2
SIMULATED = {"H100": H100}
SIMULATED_BLOCKS, MIN_BLOCK_S = 12, 0.15  # of the clock: a stage's own code takes some 0.02 s of it
MIN_BLOCKS, MAX_BLOCKS = 100, 1000
SAMPLE_S = 0.1
PATIENCE_S = 120

Call = tuple[float, float, int]  # start, seconds and rows of a stage's batch


@dataclass(frozen=True)
class Used:
    """One number of stages on the device; shares are of 1."""

    num_stages: int  # processes on the device
    rows_per_s: float  # rows that left the last stage
    of_unsplit: float  # the same over the forward rate of the whole model
    idle_share: float  # of the time, no stage computed
    memory_share: float | None  # of the device's memory; None on the CPU


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = ", ".join(sorted(MODELS))
    parser.add_argument("--model", help=f"a folder, or {known}; by default vit-b-32, on the CPU the demo's model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--stages", default="1,2,3", help="numbers of stages")
    parser.add_argument("--batch-size", type=int, help=f"rows, also of a block; {GPU_ROWS}, on the CPU {CPU_ROWS}")
    parser.add_argument("--compile", action="store_true", help="compile the layers, those of the yardstick included")
    parser.add_argument("--simulated", choices=sorted(SIMULATED), help="name of a device")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement, about; simulated 6 or more")
    parser.add_argument("--photographs", type=Path, metavar="DIR", help="a folder of JPEGs; else the shipped emoji")
    parser.add_argument("--num-files", type=int, default=12_000, help="pairs of the loop by hand and the runs, at most")
    options = parser.parse_args(arguments)

    if options.simulated:
        if options.model not in (None, *MODELS):
            parser.error(f"--model {options.model}: simulated are {', '.join(sorted(MODELS))}")
        simulate(options)
        return
    options.batch_size = options.batch_size or (GPU_ROWS if options.device == "cuda" else CPU_ROWS)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    problem = cuda_problem() if options.device == "cuda" else None
    if problem is not None:
        print(f"unmeasured: no GPU ({problem})")
        print(json.dumps({"unmeasured": "no GPU"}))
        return
    name = options.model or ("vit-b-32" if options.device == "cuda" else None)
    with model_folder(options, name) as folder:
        by_hand = beside_by_hand(TITLES[name], folder, options) if name in TITLES else {}
        model = open_model(str(folder))
        rows = make_rows(model, options.batch_size)
        unsplit = unsplit_rate(model, options)
        runs = [measure(model, rows, unsplit, int(each), options) for each in options.stages.split(",")]
    name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    how = f"{options.dtype}, {'compiled' if options.compile else 'eager'}, batches of {options.batch_size}"
    print(f"{name}, {how}: the whole model makes {unsplit:,.0f} rows/s")
    columns = {"rows_per_s": 0, "of_unsplit": 2, "idle_share": 2, "memory_share": 2}
    lines = [(run.num_stages, *(number(getattr(run, name), each) for name, each in columns.items())) for run in runs]
    table([("stages", "rows/s", "of unsplit", "idle", "memory"), *lines])
    document = {"device": name, "compiled": options.compile, "unsplit_rows_per_s": unsplit} | by_hand
    print(json.dumps(document | {"runs": [asdict(run) for run in runs]}))


def simulate(options: argparse.Namespace) -> None:
    config, figures = MODELS[options.model or "vit-l-14"](), SIMULATED[options.simulated]
    num_rows = options.batch_size or GPU_ROWS
    block_s = num_rows / forward_rate(config, figures, num_rows, 1.0, MIN_CALLS)  # a first look
    limit = forward_rate(config, figures, num_rows, slow_motion(1, block_s, options.seconds), MIN_CALLS)
    found, rows = {}, [("stages", "rows/s", "of limit", "predicted", *(f"waits for {cause}" for cause in CAUSES))]
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as name:
        folder = write_config(config, Path(name))
        for num_stages in map(int, options.stages.split(",")):
            slowness, sizes = slow_motion(num_stages, block_s, options.seconds), (num_rows, SIMULATED_BLOCKS)
            rate, idle = simulate_stages(config, folder, figures, num_stages, *sizes, slowness=slowness)
            predicted = predicted_rate(config, options.simulated, num_stages, num_rows)
            found[str(num_stages)] = {"rows_per_s": rate, "predicted_rows_per_s": predicted, "idle": idle}
            shares = [number(idle[cause], 3) for cause in CAUSES]
            rows.append((str(num_stages), number(rate, 0), number(rate / limit, 2), number(predicted, 0), *shares))
    print(f"simulated {figures.name}, {config.name}, batches of {num_rows}: forward passes only {limit:,.0f} rows/s")
    table(rows)
    document = {"device": f"simulated {figures.name}", "model": config.name, "batch_size": num_rows}
    print(json.dumps(document | {"limit_rows_per_s": limit, "stages": found}))


def slow_motion(num_stages: int, block_s: float, seconds: float) -> float:
    """How many times longer all takes, so that a simulation with all its blocks takes so many seconds, or its least."""
    num_blocks = blocks_before(num_stages) + SIMULATED_BLOCKS + GPU_CALLS * num_stages
    return max(MIN_BLOCK_S, seconds / num_blocks) / block_s


def predicted_rate(config: ModelConfig, device_name: str, num_stages: int, num_rows: int) -> float:
    """Rows a second that the planner expects of a device on which nothing but stages counts."""
    device, num_tokens = DEVICES[device_name], round(caption_lengths(config, num_rows).float().mean().item())
    mix = DataMix(caption_tokens=num_tokens)
    costs = estimate_costs(config, device, "bfloat16", num_tokens, num_rows)
    nothing = HostCosts(0.0, 0.0, 0.0, 0.0, 0.0, "estimated")
    problem = make_problem(
        config, ((1, device),), {device.name: costs}, nothing, mix=mix, dtype="bfloat16", rows_per_batch=num_rows
    )
    return plan_placement(problem, num_stages).items_per_s or 0.0


@contextmanager
def model_folder(options: argparse.Namespace, name: str | None) -> Iterator[Path]:
    """The folder that was asked for, or random weights of a published model."""
    if name not in MODELS:
        yield Path(options.model or DEMO_MODEL)
        return
    config, tokenizer_json = with_tokenizer(MODELS[name]())
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        yield init_model(config, Path(folder) / "model", seed=0, tokenizer_json=tokenizer_json)


def with_tokenizer(config: ModelConfig) -> tuple[ModelConfig, str]:
    """A published configuration with the demo's tokeniser: its end token, and captions padded where the model pads."""
    tokenizer, text = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")), config.required_text
    if text.end_id is not None:
        text = text.model_copy(update={"eos_token_id": tokenizer.encode("").ids[-1]})
    if text.has_fixed_length:
        tokenizer.enable_truncation(text.max_tokens)
        tokenizer.enable_padding(length=text.max_tokens)
    return config.model_copy(update={"text": text}), tokenizer.to_str()


def beside_by_hand(title: str, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure what a user would do by hand, and runs from the same files; prints a table."""
    library = make_library(dict(PUBLISHED[title].config or {}), options.dtype, options.device)
    batches = BATCHES if options.device == "cuda" else (options.batch_size,)
    forward = forward_rates(library, batches, options.seconds / 4)
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as name:
        root = Path(name).resolve()
        pairs = read_photographs(options.photographs, options.num_files) if options.photographs else shipped_pairs()
        items = write_pairs(root / "items", options.num_files, pairs)
        side = library.model.config.vision_config.image_size
        files = Files(items, side, model / "tokenizer.json", library.num_tokens)
        loop = loop_rate(library, files, options.batch_size, num_cpus(), options.seconds)
        for path in files.images[loop["num_rows"] :]:  # runs embed what the loop did
            path.unlink()
            path.with_suffix(".txt").unlink()
        del library
        if options.device == "cuda":
            torch.cuda.empty_cache()
        chosen = {"dtype": options.dtype, "device": options.device, "compile_": options.compile}
        chosen["timeout_s"] = PATIENCE_S + 6 * options.seconds
        runs = {key: run_from_files(model, items, root / key, int(key), **chosen) for key in options.stages.split(",")}
    rows: list[tuple[str, ...]] = [("from files", "rows/s", "with start-up", "GPU busy", "watts", "idle by cause")]
    rows.append(("loop by hand", number(loop["rows_per_s"], 0), number(loop["num_rows"] / loop["whole_s"], 0)))
    for each, run in runs.items():
        if "failed" in run:
            print(f"{each} stages: {run['failed']}", file=sys.stderr)
            rows.append((f"{each} stages",))
            continue
        idle = ", ".join(f"{cause} {share:.2f}" for cause, share in (run["idle"] or {}).items()) or "-"
        figures = number(run["gpu_busy"], 2), number(run["watts"], 0), idle
        rows.append((f"{each} stages", number(run["rows_per_s"], 0), number(run["whole_rows_per_s"], 0), *figures))
    compiled = number(forward["compiled"], 0) if forward["compiled"] else f"not compiled ({forward['not_compiled']})"
    best = number(forward["eager"].get(forward["best_batch"]), 0)
    print(f"library's forward passes, batches of {forward['best_batch']}: {best} rows/s; compiled: {compiled}")
    table([(*row, *["-"] * (len(rows[0]) - len(row))) for row in rows])
    return {"library": forward, "loop": loop, "from_files": runs}


def make_rows(model: Model, num_rows: int) -> pa.Table:
    """Rows as decoding hands them on, with both sides that the model has."""
    states = sample_inputs(model, num_rows)
    if any(model.config.towers[side].sample_grids(state.lengths) is not None for side, state in states.items()):
        raise SystemExit(f"{model.folder}: images of any shape aren't measured; name a model of square ones")
    return rows_of(states, num_rows)


def sample_inputs(model: Model, num_rows: int, device: str = "cpu") -> dict[str, TowerState]:
    states = {}
    for side, tower in model.config.towers.items():
        lengths = tower.sample_lengths(num_rows, CAPTION_TOKENS)
        states[side] = TowerState(tower.sample_input(lengths).to(device), lengths)
    return states


def unsplit_rate(model: Model, options: argparse.Namespace) -> float:
    """Rows a second of the whole model in one shard, whose input is on the device."""
    shard = load_shard(model.folder, whole_model(model.config), dtype=options.dtype, device=options.device)
    states = dict.fromkeys(INPUTS, None) | sample_inputs(model, options.batch_size, options.device)
    costs = group_costs_here(model.config, options.device, options.dtype)
    arranged = shard.arrange(Batch(states["vision"], states["text"]), dict(costs))
    arranged = arranged.move_to(lambda values: values.to(options.device))
    compiled = CompiledShard(0, shard) if options.compile else None
    run = compiled or shard.compute

    def forward() -> None:
        with torch.inference_mode():
            run(arranged)
        if options.device == "cuda":
            torch.cuda.synchronize()

    calls_per_s = call_rate(forward, options.seconds / 4)
    if compiled is not None and not compiled.is_compiled:
        raise SystemExit("--compile: the layers of the whole model could not be compiled; the warning above says why")
    return calls_per_s * options.batch_size


def measure(model: Model, rows: pa.Table, unsplit: float, num_stages: int, options: argparse.Namespace) -> Used:
    """Cut the model, measure each stage by itself, and then all of them as a run makes them."""
    settings = {"num_stages": num_stages, "batch_size": options.batch_size, "dtype": options.dtype}
    config = load_config(overrides=settings | {"device": options.device, "compile": options.compile})
    if options.device == "cuda":
        torch.cuda.empty_cache()
    # More than pass in that time: a stage that starts late would find the others' work done.
    num_blocks = min(MAX_BLOCKS, max(MIN_BLOCKS, int(4 * unsplit * options.seconds / options.batch_size)))
    calls, memory_share = run_stages(config, model, rows, num_blocks, options.seconds)
    if (window := common_window(calls)) is None:
        raise SystemExit(f"{num_stages} stages never computed at the same time, in {num_blocks} blocks")
    rate, idle_share = rate_and_idle(calls, window)
    return Used(num_stages, rate, rate / unsplit, idle_share, memory_share)


def run_stages(
    config: RunConfig, model: Model, rows: pa.Table, num_blocks: int, seconds: float
) -> tuple[dict[str, list[Call]], float | None]:
    """Send blocks through the stages of a run until all have computed for so long; gives their batches and memory."""
    plan = make_plan(config.compute, model)
    store_bytes = ray_store_bytes(config.batch_size, model, plan, settings_of(config.compute.devices, model.config))
    session = ray_session(None, PATIENCE_S, store_bytes)
    with fast_start(config.fast_start), session as available, memory_taken() as shares:
        allocation = allocate(config.compute, available, plan.stages)
        dataset = ray.data.range(num_blocks, override_num_blocks=num_blocks).map_batches(
            lambda _, rows=rows: rows, batch_format="pyarrow", batch_size=None, num_cpus=allocation.decode_cpus
        )
        embedded = through_stages(dataset, stage_specs(config.compute, model, plan, allocation), allocation)
        calls = calls_until(embedded.iter_batches(batch_format="pyarrow", batch_size=None), seconds)
    return calls, max(shares, default=None)


def calls_until(blocks: Iterable[pa.Table], seconds: float) -> dict[str, list[Call]]:
    """Each stage's batches, until all stages have computed at the same time for so long, or the blocks are through."""
    calls: dict[str, list[Call]] = {}
    for block in blocks:
        for step in chain.from_iterable(block["trace"].drop_null().to_pylist()):
            if step["step"].startswith("stage"):
                calls.setdefault(step["step"], []).append((step["started_s"], step["wall_s"], step["num_rows"]))
        if (window := common_window(calls)) is not None and window[1] - window[0] >= seconds:
            break
    return calls


@contextmanager
def memory_taken() -> Iterator[list[float]]:
    shares: list[float] = []
    if not torch.cuda.is_available():
        yield shares
        return
    before = torch.cuda.mem_get_info()[0]

    def sample() -> bool:
        free, total = torch.cuda.mem_get_info()
        shares.append((before - free) / total)
        return True

    sampler = RepeatingThread(SAMPLE_S, sample, "memory")
    try:
        yield shares
    finally:
        sampler.stop()


def common_window(calls: dict[str, list[Call]]) -> tuple[float, float] | None:
    """From when each stage has computed some batches to when the first has run dry; None where there is none."""
    by_stage = [sorted(stage) for stage in calls.values()]
    if min(map(len, by_stage), default=0) < WARM_CALLS:
        return None
    start_s = max(stage[WARM_CALLS - 1][0] + stage[WARM_CALLS - 1][1] for stage in by_stage)
    stop_s = min(max(began_s + seconds for began_s, seconds, _ in stage) for stage in by_stage)
    return (start_s, stop_s) if stop_s > start_s else None


def rate_and_idle(calls: dict[str, list[Call]], window: tuple[float, float]) -> tuple[float, float]:
    """Rows a second that left the last stage within the window, and the part of it in which none computed."""
    (start_s, stop_s), by_stage = window, [calls[step] for step in sorted(calls)]
    window_s, busy_s, reached_s = stop_s - start_s, 0.0, start_s
    for began_s, seconds, _ in sorted(call for stage in by_stage for call in stage):
        ended_s = min(began_s + seconds, stop_s)
        busy_s += max(0.0, ended_s - max(began_s, reached_s))
        reached_s = max(reached_s, ended_s)
    num_rows = sum(rows for began_s, seconds, rows in by_stage[-1] if start_s < began_s + seconds <= stop_s)
    return num_rows / window_s, 1 - busy_s / window_s


if __name__ == "__main__":
    main()
