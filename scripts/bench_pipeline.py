"""The pipeline beside the limit of the hardware, a script by hand, Ray Data as documented, and Daft.

    python scripts/bench_pipeline.py                                    # half an hour on two cores
    python scripts/bench_pipeline.py --photographs DIR --num-photographs 2000 --num-emoji 20000 --rounds 3   # hours
    python scripts/bench_pipeline.py --daft PYTHON                      # an interpreter that has daft and torch
    python scripts/bench_pipeline.py --only limit,loop,ray3 --models small --num-emoji 8000
    python scripts/bench_pipeline.py --models clip-b32,siglip-b16 --only library,ray3 --rounds 3   # a library's models
    python scripts/bench_pipeline.py --bulk                             # also streaming beside stage after stage
    python scripts/bench_pipeline.py --beside DIR                       # also another checkout's pipeline, in turns
    python scripts/bench_pipeline.py --quick                            # a minute: shows that it runs, measures nothing

A ViT-S/16 with a text tower of base size (fresh weights) embeds photographs, the shipped model embeds the shipped
emoji; both repeated up to the number asked for, each a pair with its caption. All contestants get the same files,
weights, dtype and cores; each runs in a process of its own and they take turns, so that what else the machine
does hits all alike. Medians of the rounds. Vectors must be equal (cosine >= 0.999 and none nearer to another item's),
else there is no table.

clip-b32 and siglip-b16 are transformers' own CLIP ViT-B/32 and SigLIP B/16 with random weights, imported as a user
imports them, beside a careful loop around that library's model, processor and tokeniser (`library`). Here the vectors
must be equal without their mean, too, and each row's nearest in the other's vectors its own. Give them photographs in
thousands: of a short run, the window counts what stages had computed before it. clip-tiny and siglip-tiny show that it
runs; with --dtype float32, as they are too narrow for bfloat16.

items/s is steady: items finished between the first quarter of all and the third, by when their vectors were there.
`first s` and `whole s` count from the command's start, with imports, and `whole s` ends with what was written and, of
the pipeline, published. CPU is that of all processes. The limit is forward passes alone, so nothing that also reads
files can pass it, unless it uses the cores better; the loop has found its own best numbers of threads and workers.
The last line is one JSON document.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from corpus import DEMO_MODEL, Pair, make_model, shipped_pairs, write_pairs
from embedder.placement import hardware
from pipeline_bench.bulk import compare_bulk
from pipeline_bench.contest import hold, paired_ratios, ratios, show_standings
from pipeline_bench.contestants import NAMES, contestants
from pipeline_bench.task import Task
from pipeline_bench.tuning import library_settings, settings_of, tuned
from shards.config import load_model_config
from shards.plan import plan_shards

PHOTOGRAPHS = Path(__file__).resolve().parents[2] / "shared" / "data" / "photos"
QUICK = {"num_photographs": 24, "num_emoji": 48, "rounds": 1, "only": "loop,local", "models": "small"}
DEFAULT_KEYS = [key for key in NAMES if key != "auto"]
NUM_OBJECTS = 10  # in a long caption
PHOTO_SUFFIXES = (".jpg", ".jpeg")
LIBRARY_MODELS = ("clip-b32", "siglip-b16", "clip-tiny", "siglip-tiny")
MODELS = ("vit-s", "small", *LIBRARY_MODELS)

# ViT-S/16, and a text tower of 12 layers, 768 wide, with the shipped tokeniser's vocabulary.
VIT_S = {"image_size": 224, "patch_size": 16, "width": 384, "depth": 12, "num_heads": 6}
TEXT_BASE = {
    "hidden_size": 768,
    "embedding_size": 128,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
}
LIBRARIES = ("torch", "timm", "transformers", "ray", "pyarrow", "pillow")


def main() -> None:
    options = read_options()
    num_cores = hardware.num_cpus()
    found: dict = {"num_cores": num_cores, "dtype": options.dtype, "rounds": options.rounds, "workloads": {}}
    found["versions"] = {name: version(name) for name in LIBRARIES}
    with tempfile.TemporaryDirectory(prefix="bench-pipeline-", dir=options.folder) as name:
        root = Path(name).resolve()
        for workload, task in workloads(root, options):
            found["workloads"][workload] = measure(workload, task, root / workload, options, num_cores)
    print(json.dumps(found))


def read_options() -> argparse.Namespace:
    """The command line; `--quick` gives other defaults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photographs", type=Path, default=PHOTOGRAPHS, metavar="DIR", help="a folder of JPEGs")
    parser.add_argument("--num-photographs", type=int, default=400)
    parser.add_argument("--num-emoji", type=int, default=4000)
    parser.add_argument("--models", default="vit-s,small", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", help="of all but `Ray Data, fp32`")
    parser.add_argument("--only", default=",".join(DEFAULT_KEYS), help=f"contestants: {', '.join(NAMES)}")
    parser.add_argument("--daft", metavar="PYTHON", help="interpreter that has daft, torch, timm, transformers, pillow")
    parser.add_argument(
        "--beside",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="another checkout, whose pipeline takes part",
    )
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
    unknown = set(options.only.split(",")) - set(NAMES) | set(options.models.split(",")) - set(MODELS)
    if unknown:
        names = f"--only takes {', '.join(NAMES)}; --models {', '.join(MODELS)}"
        parser.error(f"unknown: {', '.join(sorted(unknown))}; {names}")
    return options


def workloads(root: Path, options: argparse.Namespace) -> Iterator[tuple[str, Task]]:
    """Models with their items, made one at a time, by name."""
    models = options.models.split(",")
    if options.photographs == PHOTOGRAPHS and not PHOTOGRAPHS.is_dir():
        left_out = [name for name in models if name != "small"]
        models = [name for name in models if name == "small"]
        if left_out:
            print(f"no photographs: give a folder with --photographs; left out: {', '.join(left_out)}", flush=True)
    if "vit-s" in models:
        model = make_model(root / "vit-s-model", VIT_S, TEXT_BASE)
        pairs = read_photographs(options.photographs, options.num_photographs)
        yield "vit-s", task_of(model, root / "photographs", options.num_photographs, pairs, options.dtype)
    if "small" in models:
        pairs = shipped_pairs()[: options.num_emoji]
        yield "small", task_of(DEMO_MODEL, root / "emoji", options.num_emoji, pairs, options.dtype)
    for name in (name for name in models if name in LIBRARY_MODELS):
        from pipeline_bench.library_models import make_library_model

        pairs = with_long_captions(read_photographs(options.photographs, options.num_photographs))
        checkpoint, model = make_library_model(name, root / f"{name}-model", [caption for _, _, caption in pairs])
        task = task_of(model, root / f"{name}-photographs", options.num_photographs, pairs, options.dtype)
        yield name, replace(task, checkpoint=str(checkpoint))


def read_photographs(folder: Path, limit: int) -> list[Pair]:
    """The JPEGs of a folder; a caption is what stands in the file's name behind the first underscore.

    Raises:
        SystemExit: there are none.
    """
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in PHOTO_SUFFIXES)[:limit]
    if not paths:
        raise SystemExit(f"{folder}: no JPEG; give another folder with --photographs, or leave out the model vit-s")
    objects = [path.stem.partition("_")[2].replace("_", " ") for path in paths]
    return [(path.read_bytes(), ".jpg", f"a photograph of a {name}") for path, name in zip(paths, objects, strict=True)]


def with_long_captions(pairs: list[Pair]) -> list[Pair]:
    """Pairs whose captions name what is in their own photograph and in others: about sixty tokens.

    A caption of one object among a text tower's 64 tokens moves the vector less than bfloat16 does.
    """
    draw = random.Random(0)
    objects = [caption.removeprefix("a photograph of a ") for _, _, caption in pairs]
    others = min(NUM_OBJECTS - 1, len(objects))
    return [
        (content, suffix, ", ".join([name, *draw.sample(objects, others)]))
        for (content, suffix, _), name in zip(pairs, objects, strict=True)
    ]


def task_of(model: Path, folder: Path, num_items: int, pairs: list[Pair], dtype: str) -> Task:
    """Write the pairs, repeated up to the number asked for; the task of embedding them.

    Args:
        model: model folder.
        folder: of the items, to make.
        num_items: pairs to write.
        pairs: their contents.
        dtype: compute dtype.
    """
    return Task(str(model), str(write_pairs(folder, num_items, pairs)), num_items, len(pairs), dtype)


def measure(workload: str, task: Task, folder: Path, options: argparse.Namespace, num_cores: int) -> dict:
    """Tune, hold the contest, and show it.

    Args:
        workload: its name.
        task: model and items.
        folder: for the results.
        options: the command line.
        num_cores: of this machine.
    """
    print(f"{workload}: {task.num_items:,} pairs, {task.num_distinct:,} of them distinct", flush=True)
    settings = settings_of((options.batch_size, num_cores), (num_cores, num_cores), {})
    if task.checkpoint:
        settings = library_settings(options.batch_size, num_cores, num_cores)
    if options.tune:
        settings = tuned(task, num_cores, folder / "tuning", options.timeout)
        print("  best:", json.dumps({key: each for key, each in settings.items() if key != "trials"}), flush=True)
    taking_part = contestants(task, settings, options, num_cores)
    standings = hold(taking_part, folder, options.rounds, options.timeout, centred=bool(task.checkpoint))
    (whole,) = plan_shards(load_model_config(task.model), 1, dtype=options.dtype).stages
    item_flops = whole.flops_per_image + whole.flops_per_caption
    title = f"{workload}: {task.num_items:,} pairs, {options.dtype}, {num_cores} cores"
    show_standings(title, standings, num_cores, item_flops)
    found = {
        "num_items": task.num_items,
        "num_distinct": task.num_distinct,
        "item_flops": item_flops,
        "settings": settings,
        "contestants": {name: standing.to_json() for name, standing in standings.items()},
        "ratios": ratios(standings),
        "paired": paired_ratios(standings, taking_part),
    }
    if options.bulk:
        found["bulk"] = compare_bulk(workload, task, folder / "bulk", options.timeout)
    return found


if __name__ == "__main__":
    main()
