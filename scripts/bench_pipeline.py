"""The pipeline beside the limit of the hardware, a script by hand, Ray Data as documented, and Daft.

    python scripts/bench_pipeline.py                                    # half an hour on two cores
    python scripts/bench_pipeline.py --photographs DIR --num-photographs 2000 --num-emoji 20000 --rounds 3   # hours
    python scripts/bench_pipeline.py --daft PYTHON                      # an interpreter that has daft and torch
    python scripts/bench_pipeline.py --only limit,loop,ray3 --models small --num-emoji 8000
    python scripts/bench_pipeline.py --bulk                             # also streaming beside stage after stage
    python scripts/bench_pipeline.py --quick                            # a minute: shows that it runs, measures nothing

A ViT-S/16 with an ALBERT of the size of albert-base-v2 (fresh weights) embeds photographs, the shipped model embeds the
shipped emoji; both repeated up to the number asked for, each a pair with its caption. All contestants get the same
files, weights, dtype and cores; each runs in a process of its own and they take turns, so that what else the machine
does hits all alike. Medians of the rounds. Vectors must be equal (cosine >= 0.999 and none nearer to another item's),
else there is no table.

items/s is steady: items finished between the first quarter of all and the third, by when their vectors were there.
`first s` and `whole s` count from the command's start, with imports, and `whole s` ends with what was written and, of
the pipeline, published. CPU is that of all processes. The limit is forward passes alone, so nothing that also reads
files can pass it, unless it uses the cores better; the loop has found its own best numbers of threads and workers.
The last line is one JSON document.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from embedder.engine import hardware
from pipeline_bench.bulk import compare_bulk, show_bulk
from pipeline_bench.contest import hold
from pipeline_bench.contestants import KEYS, Setup, contestants
from pipeline_bench.show import ratios, show_standings
from pipeline_bench.task import Task
from pipeline_bench.tuning import tuned, untuned
from pipeline_bench.workload import Workload, small_on_emoji, vit_s_on_photographs
from shards.config import load_model_config
from shards.plan import plan_shards

PHOTOGRAPHS = Path(__file__).resolve().parents[2] / "shared" / "data" / "photos"
QUICK = {"num_photographs": 24, "num_emoji": 48, "rounds": 1, "only": "loop,local", "models": "small"}
DEFAULT_KEYS = [key for key in KEYS if key != "auto"]
LIBRARIES = ("torch", "timm", "transformers", "ray", "pyarrow", "pillow")


def main() -> None:
    options = read_options()
    num_cores = hardware.num_cpus()
    found: dict = {"num_cores": num_cores, "dtype": options.dtype, "rounds": options.rounds, "workloads": {}}
    found["versions"] = {name: version(name) for name in LIBRARIES}
    with tempfile.TemporaryDirectory(prefix="bench-pipeline-", dir=options.folder) as name:
        root = Path(name)
        for workload in workloads(root, options):
            found["workloads"][workload.name] = measure(workload, root / workload.name, options, num_cores)
    print(json.dumps(found))


def read_options() -> argparse.Namespace:
    """The command line; `--quick` gives other defaults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photographs", type=Path, default=PHOTOGRAPHS, metavar="DIR", help="a folder of JPEGs")
    parser.add_argument("--num-photographs", type=int, default=400)
    parser.add_argument("--num-emoji", type=int, default=4000)
    parser.add_argument("--models", default="vit-s,small", help="vit-s, small, or both")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", help="of all but `Ray Data, fp32`")
    parser.add_argument("--only", default=",".join(DEFAULT_KEYS), help=f"contestants: {', '.join(KEYS)}")
    parser.add_argument("--daft", metavar="PYTHON", help="interpreter that has daft, torch, timm, transformers, pillow")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the pipeline's own runs")
    parser.add_argument("--no-tuning", dest="tune", action="store_false", help="run with plausible numbers of threads")
    parser.add_argument("--batch-size", type=int, default=64, help="of the limit and the loop, where nothing is tuned")
    parser.add_argument("--bulk", action="store_true", help="also streaming beside stage after stage")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds of one contestant's run")
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made")
    parser.add_argument("--quick", action="store_true", help="tiny numbers, two contestants, no tuning")
    if "--quick" in sys.argv[1:]:
        parser.set_defaults(**QUICK, tune=False)
    options = parser.parse_args()
    unknown = set(options.only.split(",")) - set(KEYS) | set(options.models.split(",")) - {"vit-s", "small"}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; --only takes {', '.join(KEYS)}; --models vit-s, small")
    return options


def workloads(root: Path, options: argparse.Namespace) -> Iterator[Workload]:
    """Models with their items, made one at a time."""
    models = options.models.split(",")
    if "vit-s" in models and options.photographs == PHOTOGRAPHS and not PHOTOGRAPHS.is_dir():
        print("no photographs: give a folder with --photographs; the model vit-s is left out", flush=True)
        models.remove("vit-s")
    if "vit-s" in models:
        yield vit_s_on_photographs(root, options.photographs, options.num_photographs)
    if "small" in models:
        yield small_on_emoji(root, options.num_emoji)


def measure(workload: Workload, folder: Path, options: argparse.Namespace, num_cores: int) -> dict:
    """Tune, hold the contest, and show it."""
    say(f"{workload.name}: {workload.num_items:,} pairs, {workload.num_distinct:,} of them distinct")
    settings = untuned(num_cores, options.batch_size)
    if options.tune:
        model, items = str(workload.model), str(workload.items)
        task = Task(model, items, "", options.dtype, workload.num_distinct)
        settings = tuned(task, num_cores, folder / "tuning", options.timeout)
        say("  best: " + json.dumps({"limit": asdict(settings.limit), "loop": asdict(settings.loop)}))
    setup = Setup(workload, options.dtype, num_cores, settings, options.daft, tuple(options.set))
    taking_part = contestants(setup, options.only.split(","))
    standings = hold(taking_part, folder, options.rounds, options.timeout, say)
    config = load_model_config(workload.model)
    (whole,) = plan_shards(config, 1, dtype=options.dtype).stages
    item_flops = whole.flops_per_image + whole.flops_per_caption
    title = f"{workload.name}: {workload.num_items:,} pairs, {options.dtype}, {num_cores} cores"
    show_standings(title, standings, num_cores, item_flops)
    found = {
        "num_items": workload.num_items,
        "num_distinct": workload.num_distinct,
        "item_flops": item_flops,
        "settings": asdict(settings),
        "contestants": {name: standing.to_json() for name, standing in standings.items()},
        "ratios": ratios(standings),
    }
    if options.bulk:
        found["bulk"] = compare_bulk(workload, folder / "bulk", options.dtype, options.timeout)
        show_bulk(found["bulk"])
    return found


def say(message: str) -> None:
    print(message, flush=True)


if __name__ == "__main__":
    main()
