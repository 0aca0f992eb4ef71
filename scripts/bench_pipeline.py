"""The pipeline compared with the limit of the hardware, a script by hand, Ray Data as documented, and Daft.

    python scripts/bench_pipeline.py                                    # half an hour on two cores
    python scripts/bench_pipeline.py --photographs DIR --num-photographs 2000 --num-emoji 20000 --rounds 3   # hours
    python scripts/bench_pipeline.py --daft PYTHON                      # an interpreter that has daft and torch
    python scripts/bench_pipeline.py --only limit,loop,ray3 --models small --num-emoji 8000
    python scripts/bench_pipeline.py --beside DIR                       # also another checkout's pipeline, in turns
    python scripts/bench_pipeline.py --quick                            # a minute: shows that it runs, measures nothing

A ViT-S/16 with a text tower of base size (fresh weights) embeds photographs, the shipped model the shipped emoji, each
with its caption. All contestants get the same files, weights, dtype and cores, each in its own process, in turns;
medians of the rounds. Vectors must be equal (cosine >= 0.999, none nearer to another item's), else there is no table.

items/s is steady: items finished between the first quarter of all and the third. `first s` and `whole s` count from the
command's start, with imports, to what was written or published. The last line is one JSON document.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import embedder
from corpus import DEMO_MODEL, make_model, read_photographs, shipped_pairs, write_pairs
from embedder.placement import hardware
from embedder.store.files import StoreFiles
from embedder.store.journal.journal import stream_entries
from embedder.store.journal.runs import all_runs
from harness import EMBEDDER, MIB, number, run_watched, table
from pipeline_bench.plain import SIDES, VECTORS_FOLDER, Event, Task, read_finished
from shards.model_config import load_model_config
from shards.plan import plan_shards

FIRST_SHARE, LAST_SHARE = 0.25, 0.75  # of all items


class Window(NamedTuple):
    """Between two moments at which batches were finished."""

    start_s: float
    stop_s: float
    num_items: int  # finished after the first and up to the second

    @property
    def items_per_s(self) -> float:
        return self.num_items / (self.stop_s - self.start_s)


def steady_window(finished: Sequence[Event]) -> Window | None:
    """From a quarter of all items finished to three quarters; None where one batch was both.

    Items that were finished together count at their own moment, never as spread over the time before it.
    """
    total, done = sum(size for _, size in finished), 0
    start: Event | None = None
    for time_s, size in sorted(finished):
        done += size
        if start is None and done >= FIRST_SHARE * total:
            start = time_s, done
        if start is not None and done >= LAST_SHARE * total:
            return Window(start[0], time_s, done - start[1]) if time_s > start[0] else None
    return None


def last_stage_events(calls: Iterable[dict[str, Any]]) -> list[Event]:
    """When the last stage of a run handed on its batches, from the measurements of its steps."""
    stages = [call for call in calls if call["step"].startswith("stage ")]
    last = max((call["step"] for call in stages), key=lambda step: int(step.split()[1]))
    ends = ((call["started_s"] + call["wall_s"], call["num_rows"]) for call in stages if call["step"] == last)
    return sorted(ends)


MIN_COSINE = 0.999


class UnequalVectorsError(Exception):
    """Contestants that are measured against each other did not compute the same."""


@dataclass(frozen=True)
class Vectors:
    """Of all items, in the order of their ids: float32 (N, E), length 1."""

    ids: tuple[str, ...]
    images: np.ndarray
    texts: np.ndarray


def read_files(out: Path) -> Vectors:
    files = sorted((out / VECTORS_FOLDER).rglob("*.parquet"))
    tables = [pq.read_table(file) for file in files]
    if "vectors" in tables[0].schema.names:  # both sides in one list
        both = from_table(pa.concat_tables(tables), ("vectors", "vectors"))
        width = both.images.shape[1] // 2
        return Vectors(both.ids, both.images[:, :width], both.texts[:, width:])
    return from_table(pa.concat_tables(tables))


def from_table(table: pa.Table, sides: tuple[str, str] = SIDES) -> Vectors:
    """Sort by id; columns are lists of any kind, or tensors of Ray."""
    table = table.select(dict.fromkeys(("item_id", *sides))).sort_by("item_id")
    images, texts = (np.stack(table[side].to_numpy()).astype(np.float32) for side in sides)
    return Vectors(tuple(table["item_id"].to_pylist()), images, texts)


def check_equal(vectors: Mapping[str, Vectors]) -> dict[str, float]:
    """Compare all contestants with the first; gives the least cosine of each.

    An untrained tower sends all inputs to nearly one place, where a cosine says nothing; so each vector must also be
    nearer to its own in the first contestant than to that of any other content among its neighbours by id.
    """
    (first, reference), *_ = vectors.items()
    least = {}
    for name, other in vectors.items():
        if other.ids != reference.ids:
            missing = f"{len(set(reference.ids) - set(other.ids))} of the {len(reference.ids)} of {first} are missing"
            raise UnequalVectorsError(f"{name}: {len(other.ids)} items, {missing}")
        pairs = {"images": (reference.images, other.images), "texts": (reference.texts, other.texts)}
        least[name] = min(_least_cosine(f"{name} against {first}, {side}", *pair) for side, pair in pairs.items())
    return least


def _least_cosine(who: str, a: np.ndarray, b: np.ndarray) -> float:
    if a.shape != b.shape:
        raise UnequalVectorsError(f"{who}: shapes {a.shape} and {b.shape}")
    cosines = np.sum(a * b, axis=1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))
    least = float(cosines.min())
    if not least >= MIN_COSINE:  # a NaN is no success
        raise UnequalVectorsError(f"{who}: row {int(cosines.argmin())} has a cosine of {least:.6f}, not {MIN_COSINE}")
    # Which rows of b are nearer to the row before their own in a, unless a's two are the same.
    neighbours = np.roll(a, 1, axis=0)
    differs = np.linalg.norm(neighbours - a, axis=1) > 0
    stray = (np.linalg.norm(b - neighbours, axis=1) < np.linalg.norm(b - a, axis=1)) & differs
    if stray.any():
        row = int(stray.argmax())
        raise UnequalVectorsError(f"{who}: row {row} is nearer to another item's vector than to its own (order?)")
    return least


Settings = dict[str, Any]
"""Numbers of a `Task` for the limit and for the loop, and the items a second of each trial."""

NAMES = {
    "limit": "limit", "processes": "limit, processes", "loop": "loop",
    "ray1": "ray, 1 stage", "ray2": "ray, 2 stages", "ray3": "ray, 3 stages", "local": "local", "auto": "auto",
    "raydata32": "Ray Data, fp32", "raydata": "Ray Data", "daft": "Daft",
}  # fmt: skip
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
    processes, chosen = _processes(task, settings, num_cores), []
    for key, name in NAMES.items():
        if key not in options.only.split(",") or (key == "daft" and options.daft is None):
            continue
        if key in processes:
            python = options.daft if key == "daft" else sys.executable
            chosen.append(Contestant(name, _process_command(*processes[key], python)))
            continue
        command = _pipeline_command(task, *PIPELINES[key], options.set)
        names = {name: None} | {f"{name} of {checkout.name}": checkout for checkout in options.beside}
        chosen += [Contestant(each, command, has_store=True, checkout=checkout) for each, checkout in names.items()]
    return chosen


def _processes(task: Task, settings: Settings, num_cores: int) -> dict[str, tuple[str, Task]]:
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


def _pipeline_command(task: Task, engine: str, num_stages: int, others: list[str]) -> Callable[[Path], Sequence[str]]:
    settings = [text for option in (f"num_stages={num_stages}", *others) for text in ("--set", option)]
    fixed = ["--model", task.model, "--engine", engine, "--dtype", task.dtype, *settings, "--json"]
    return lambda out: [*EMBEDDER, "embed", task.items, "--store", str(out / "store"), *fixed]


BATCH_SIZES = (8, 16, 32, 64)  # that are tried
TRIAL_S, MIN_BATCHES = 8.0, 4
BUSY = 0.9  # of all cores: then they are the bound
LIMITS = (NAMES["limit"], NAMES["processes"])
HEADING = ["", "items/s", "of limit", "of loop", "CPU ms/item", "cores", "first s", "whole s", "peak MiB", "cosine"]


@dataclass(frozen=True)
class Turn:
    """One run of one contestant."""

    items_per_s: float | None  # in the steady window; None where the run was too short for one
    cpu_ms: float | None  # CPU milliseconds of an item in that window, of all processes
    cores: float | None  # CPU seconds a second in it
    first_s: float  # from the command to the first finished items
    whole_s: float  # from the command to the end of its process
    peak_bytes: int  # memory of all processes (PSS)


@dataclass(frozen=True)
class Standing:
    """What the rounds of one contestant come to: medians, and how far its vectors are from the first contestant's."""

    turns: tuple[Turn, ...]
    least_cosine: float

    def median(self, name: str) -> float | None:
        """The median of a figure of the turns; None where a round has none."""
        values = [getattr(turn, name) for turn in self.turns]
        return None if None in values else float(median(values))

    def to_json(self) -> dict[str, Any]:
        rounds = [asdict(turn) for turn in self.turns]
        return {name: self.median(name) for name in rounds[0]} | {"least_cosine": self.least_cosine, "rounds": rounds}


def hold(contestants: Sequence[Contestant], folder: Path, num_rounds: int, timeout_s: float) -> dict[str, Standing]:
    """Run all rounds, and print a line about each run.

    Each round begins with another contestant, so that none always follows the same one.
    """
    turns: dict[str, list[Turn]] = {contestant.name: [] for contestant in contestants}
    cosines = dict.fromkeys(turns, 1.0)
    for round_ in range(num_rounds):
        vectors: dict[str, Vectors] = {}
        first = round_ % len(contestants)
        for contestant in [*contestants[first:], *contestants[:first]]:
            turn, vectors[contestant.name] = take_turn(contestant, folder / f"{round_}-{contestant.name}", timeout_s)
            turns[contestant.name].append(turn)
            rate = "too short" if turn.items_per_s is None else f"{turn.items_per_s:,.1f} items/s"
            what = f"{contestant.name}: {rate}, {turn.whole_s:.1f} s in all"
            print(f"  round {round_ + 1} of {num_rounds}: {what}", flush=True)
        least = check_equal({name: vectors[name] for name in turns})
        cosines = {name: min(cosines[name], least[name]) for name in turns}
    return {name: Standing(tuple(each), cosines[name]) for name, each in turns.items()}


def take_turn(contestant: Contestant, out: Path, timeout_s: float) -> tuple[Turn, Vectors]:
    out.mkdir(parents=True)
    watched = run_watched(contestant.command(out), out, timeout_s, checkout=contestant.checkout)
    if contestant.has_store:
        files = StoreFiles(str(out / "store"))
        (run,) = all_runs(files)
        calls = (call for entry in stream_entries(files, run.run_id) for call in entry.trace)
        finished, vectors = last_stage_events(calls), from_table(embedder.open_store(out / "store").to_arrow())
    else:
        finished, vectors = read_finished(out), read_files(out)
    shutil.rmtree(out)
    window = steady_window(finished)
    steady: tuple[float | None, ...] = (None, None, None)
    if window is not None:
        cpu_s, seconds = watched.cpu_use.between(window.start_s, window.stop_s), window.stop_s - window.start_s
        steady = window.items_per_s, 1e3 * cpu_s / window.num_items, cpu_s / seconds
    return Turn(*steady, finished[0][0] - watched.started_s, watched.wall_s, watched.peak_bytes), vectors


def show_standings(title: str, standings: Mapping[str, Standing], num_cores: int, item_flops: int) -> None:
    print(f"\n{title}\n")
    limits, rows = [_rate_of(standings, "limit"), _rate_of(standings, "loop")], [HEADING]
    for name, standing in standings.items():
        rate = standing.median("items_per_s")
        over = [f"{rate / other:.2f}" if rate and other else "-" for other in limits]
        figures = (("cpu_ms", 1), ("cores", 2), ("first_s", 1), ("whole_s", 1))
        shown = [number(standing.median(figure), digits) for figure, digits in figures]
        peak = number((standing.median("peak_bytes") or 0) / MIB, 0)
        rows.append([name, number(rate, 1), *over, *shown, peak, f"{standing.least_cosine:.5f}"])
    table(rows)
    print("\nwhat bounds them")
    for name in standings:
        print(f"  {name}: {bound(name, standings, num_cores, item_flops)}", flush=True)


def paired_ratios(
    standings: Mapping[str, Standing], contestants: Sequence[Contestant]
) -> dict[str, dict[str, tuple[float, ...]]]:
    """Compare this checkout's pipelines with another's, round by round: median ratio, least and largest, by figure."""
    found: dict[str, dict[str, tuple[float, ...]]] = {}
    for title, checkout in ((other.name, other.checkout) for other in contestants if other.checkout is not None):
        own = standings[title.removesuffix(f" of {checkout.name}")]
        turns, found[title] = list(zip(own.turns, standings[title].turns, strict=True)), {}
        for figure in ("items_per_s", "cpu_ms", "first_s"):
            values = [(getattr(one, figure), getattr(two, figure)) for one, two in turns]
            if all(one and two for one, two in values):
                rounds = [one / two for one, two in values]
                found[title][figure] = float(median(rounds)), min(rounds), max(rounds)
        shown = (f"{figure} {mid:.2f} [{low:.2f}, {high:.2f}]" for figure, (mid, low, high) in found[title].items())
        print(f"  over {title}, {len(turns)} rounds: {', '.join(shown)}", flush=True)
    return found


def _rate_of(standings: Mapping[str, Standing], key: str) -> float | None:
    """Steady items a second of a contestant; None where it took no part or ran too briefly."""
    return standings[NAMES[key]].median("items_per_s") if NAMES[key] in standings else None


def bound(name: str, standings: Mapping[str, Standing], num_cores: int, item_flops: int) -> str:
    """What the steady rate of a contestant is limited by, with the figures that show it."""
    standing = standings[name]
    rate, cpu_ms, cores = (standing.median(figure) for figure in ("items_per_s", "cpu_ms", "cores"))
    if rate is None or cpu_ms is None or cores is None:
        return "too short to tell"
    what, of = ("the cores,", "") if cores >= BUSY * num_cores else ("waiting:", " cores")
    parts = [f"{what} {cores:.2f} of {num_cores}{of} busy, {cpu_ms:.1f} ms of CPU an item"]
    # Of the two limits, the one that wastes less in waiting for its threads.
    forward = [standings[limit].median("cpu_ms") for limit in LIMITS if limit in standings]
    forward_ms = min((each for each in forward if each), default=None)
    if name in LIMITS:
        parts.append(f"{item_flops * rate / 1e9:,.0f} GFLOP/s at {item_flops / 1e9:.2f} GFLOP an item")
    elif forward_ms:
        parts.append(f"{cpu_ms - forward_ms:+.1f} ms against the limit's {forward_ms:.1f}")
    return "; ".join(parts)


def settings_of(batch_size: int, num_cores: int) -> Settings:
    """Plausible numbers of the limit and of the loop."""
    numbers = {"batch_size": batch_size, "num_threads": num_cores, "num_workers": num_cores}
    return {"limit": numbers | {"num_workers": 1}, "loop": numbers, "trials": {}}


def tuned(task: Task, num_cores: int, folder: Path, timeout_s: float) -> Settings:
    """Find the best numbers by trying, one after the other, each in a short run in its own process.

    The batch that is found for the limit is that of all but the pipeline, which chooses its own.
    """
    counts = sorted({num_cores, max(1, num_cores - 1), max(1, num_cores // 2)})
    threads = {"num_threads": counts, "num_workers": counts}
    choices = {"limit": {"batch_size": BATCH_SIZES, "num_threads": counts}, "loop": threads}
    settings = settings_of(BATCH_SIZES[-1], num_cores)
    rate = 0.0
    for key, numbers in choices.items():
        if key == "loop":
            settings["loop"]["batch_size"] = settings["limit"]["batch_size"]
        for name, values in numbers.items():
            rates = {}
            for value in values:
                settings[key][name] = value
                module, own = _processes(task, settings, num_cores)[key]
                num_items = min(task.num_items, max(2 * MIN_BATCHES * own.batch_size, int(TRIAL_S * rate)))
                trial = Contestant(key, _process_command(module, replace(own, num_items=num_items), sys.executable))
                turn, _ = take_turn(trial, folder / f"{key}-{name}-{value}", timeout_s)
                rates[value] = rate = turn.items_per_s or 0.0  # none where it ended in one batch
                settings["trials"][f"{key}, {name} {value}"] = rate
            settings[key][name] = max(rates, key=rates.__getitem__)
    return settings


PHOTOGRAPHS = Path(__file__).resolve().parents[2] / "shared" / "data" / "photos"
QUICK = {"num_photographs": 24, "num_emoji": 48, "rounds": 1, "only": "loop,local", "models": "small"}
DEFAULT_KEYS = [key for key in NAMES if key != "auto"]
MODELS = ("vit-s", "small")

# ViT-S/16, and a text tower of 12 layers, 768 wide, with the shipped tokeniser's vocabulary.
VIT_S = {"image_size": 224, "patch_size": 16, "width": 384, "depth": 12, "num_heads": 6}
TEXT_BASE = {
    "hidden_size": 768, "embedding_size": 128, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072,
}  # fmt: skip
LIBRARIES = ("torch", "timm", "transformers", "ray", "pyarrow", "pillow")


def main() -> None:
    options = read_options()
    num_cores = hardware.num_cpus()
    found: dict = {"num_cores": num_cores, "dtype": options.dtype, "rounds": options.rounds, "workloads": {}}
    found["versions"] = {name: version(name) for name in LIBRARIES}
    with tempfile.TemporaryDirectory(prefix="bench-pipeline-") as name:
        root = Path(name).resolve()
        for workload, task in workloads(root, options):
            found["workloads"][workload] = measure(workload, task, root / workload, options, num_cores)
    print(json.dumps(found))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photographs", type=Path, default=PHOTOGRAPHS, metavar="DIR", help="a folder of JPEGs")
    parser.add_argument("--num-photographs", type=int, default=400)
    parser.add_argument("--num-emoji", type=int, default=4000)
    parser.add_argument("--models", default="vit-s,small", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", help="of all but `Ray Data, fp32`")
    parser.add_argument("--only", default=",".join(DEFAULT_KEYS), help=f"contestants: {', '.join(NAMES)}")
    parser.add_argument("--daft", metavar="PYTHON", help="interpreter that has daft, torch, timm, transformers, pillow")
    parser.add_argument("--beside", type=Path, action="append", default=[], metavar="DIR", help="another checkout")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the pipeline's own runs")
    parser.add_argument("--no-tuning", dest="tune", action="store_false", help="run with plausible numbers of threads")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds of one contestant's run")
    parser.add_argument("--quick", action="store_true", help="tiny numbers, two contestants, no tuning")
    if "--quick" in sys.argv[1:]:
        parser.set_defaults(**QUICK, tune=False)
    options = parser.parse_args()
    unknown = set(options.only.split(",")) - set(NAMES) | set(options.models.split(",")) - set(MODELS)
    if unknown:
        known = f"--only takes {', '.join(NAMES)}; --models {', '.join(MODELS)}"
        parser.error(f"unknown: {', '.join(sorted(unknown))}; {known}")
    return options


def workloads(root: Path, options: argparse.Namespace) -> Iterator[tuple[str, Task]]:
    """Models with their items, made one at a time, by name."""
    models = options.models.split(",")
    if "vit-s" in models and options.photographs == PHOTOGRAPHS and not PHOTOGRAPHS.is_dir():
        print("no photographs: give a folder with --photographs; left out: vit-s", flush=True)
    elif "vit-s" in models:
        model = make_model(root / "vit-s-model", VIT_S, TEXT_BASE)
        pairs = read_photographs(options.photographs, options.num_photographs)
        items = write_pairs(root / "photographs", options.num_photographs, pairs)
        yield "vit-s", Task(str(model), str(items), options.num_photographs, len(pairs), options.dtype)
    if "small" in models:
        pairs = shipped_pairs()[: options.num_emoji]
        items = write_pairs(root / "emoji", options.num_emoji, pairs)
        yield "small", Task(str(DEMO_MODEL), str(items), options.num_emoji, len(pairs), options.dtype)


def measure(workload: str, task: Task, folder: Path, options: argparse.Namespace, num_cores: int) -> dict:
    print(f"{workload}: {task.num_items:,} pairs, {task.num_distinct:,} of them distinct", flush=True)
    settings = settings_of(BATCH_SIZES[-1], num_cores)
    if options.tune:
        settings = tuned(task, num_cores, folder / "tuning", options.timeout)
        print("  best:", json.dumps({key: each for key, each in settings.items() if key != "trials"}), flush=True)
    taking_part = contestants(task, settings, options, num_cores)
    standings = hold(taking_part, folder, options.rounds, options.timeout)
    (whole,) = plan_shards(load_model_config(task.model), 1, dtype=options.dtype).stages
    item_flops = whole.flops_per_image + whole.flops_per_caption
    title = f"{workload}: {task.num_items:,} pairs, {options.dtype}, {num_cores} cores"
    show_standings(title, standings, num_cores, item_flops)
    return {
        "num_items": task.num_items, "num_distinct": task.num_distinct, "item_flops": item_flops, "settings": settings,
        "contestants": {name: standing.to_json() for name, standing in standings.items()},
        "paired": paired_ratios(standings, taking_part),
    }  # fmt: skip


if __name__ == "__main__":
    main()
