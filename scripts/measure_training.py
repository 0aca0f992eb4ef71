"""Measure what an epoch of training costs: of the whole model, and of its projections alone over frozen towers.

    python scripts/measure_training.py [--model DIR] [--pairs 512] [--threads 1]

Pairs are made here: a coloured square on noise, and its colour in words. Both runs are `embedder train` in this
process; an epoch's seconds are taken from their metrics, without the first one, which decodes and starts up. What
bounds them: the towers' matrix products in the whole model, Python's loop over a batch's captions where only
projections learn. The frozen towers of an untrained copy run once, and the R@1 before and after says what projections
alone can lift.
"""

import argparse
import json
import tempfile
import time
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from embedder.cli.render_training import TrainingWatcher
from embedder.storage.model_download import resolve_model
from embedder.training.config import TrainConfig, load_train_config
from embedder.training.run import train
from shards.config import load_model_config
from shards.towers import init_model
from shards.training.settings import TrainSettings
from shards.training.trainer import Trainer

COLOURS = {
    "red": (230, 30, 30),
    "green": (30, 200, 30),
    "blue": (40, 60, 240),
    "yellow": (240, 230, 40),
    "white": (250, 250, 250),
    "black": (5, 5, 5),
    "purple": (150, 30, 180),
    "orange": (250, 140, 20),
}
BATCH_SIZE = 64
NUM_EPOCHS = 4
NUM_AVERAGES = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(Path(__file__).parents[1] / "embedder" / "demo_model"))
    parser.add_argument("--pairs", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), resolve_model(options.model), options.pairs, options.threads)
    print(
        f"an epoch of {options.pairs} pairs: {found['all_epoch_s']:.2f} s for the whole model, "
        f"{found['projections_epoch_s']:.4f} s for its projections alone, {found['times_faster']:.0f} times faster"
    )
    print(f"averaging the weights: {found['average_ms']:.1f} ms of a step of {found['step_ms']:.0f} ms")
    print(
        f"projections over untrained, frozen towers: R@1 {found['r_at_1_before']:.2f} -> {found['r_at_1_after']:.2f} "
        f"on pictures never seen ({len(COLOURS)} colours, by chance {1 / len(COLOURS):.2f})"
    )
    print(json.dumps(found))


def measure(folder: Path, model: Path, num_pairs: int, num_threads: int) -> dict[str, float]:
    """Take all figures."""
    write_pairs(folder / "pairs.parquet", range(num_pairs))
    write_pairs(folder / "others.parquet", range(num_pairs, num_pairs + 128))
    steps = num_pairs // BATCH_SIZE
    seconds = {
        what: epoch_s(folder, config_of(folder, what, model, num_threads, what=what, num_steps=NUM_EPOCHS * steps))
        for what in ("all", "projections")
    }
    trainer = Trainer(model, TrainSettings())
    began_s = time.perf_counter()
    for _ in range(NUM_AVERAGES):
        trainer._average()
    average_s = (time.perf_counter() - began_s) / NUM_AVERAGES
    before, after = lifted(folder, model, num_threads)
    return {
        "num_pairs": num_pairs,
        "num_threads": num_threads,
        "all_epoch_s": seconds["all"],
        "projections_epoch_s": seconds["projections"],
        "times_faster": seconds["all"] / seconds["projections"],
        "step_ms": 1000 * seconds["all"] / steps,
        "average_ms": 1000 * average_s,
        "r_at_1_before": before,
        "r_at_1_after": after,
    }


def epoch_s(folder: Path, config: TrainConfig) -> float:
    """Seconds of the fastest epoch but the first."""
    train(config, TrainingWatcher())
    lines = [json.loads(line) for line in (Path(config.out) / "metrics.jsonl").read_text().splitlines()]
    steps = len(lines) // NUM_EPOCHS
    ends = [line["elapsed_s"] for line in lines[steps - 1 :: steps]]
    return min(stop - start for start, stop in pairwise(ends))


def lifted(folder: Path, model: Path, num_threads: int) -> tuple[float, float]:
    """R@1 on other pictures: of untrained towers, and with their projections trained."""
    tokenizer = (model / "tokenizer.json").read_text(encoding="utf-8")
    untrained = init_model(load_model_config(model), folder / "untrained", seed=0, tokenizer_json=tokenizer)
    found = []
    for name, rate, num_steps in (("before", 1e-12, 1), ("after", 1e-2, 300)):
        settings = {"what": "projections", "num_steps": num_steps, "learning_rate": rate, "ema_decay": 0.9}
        report = train(config_of(folder, name, untrained, num_threads, is_measured=True, **settings), TrainingWatcher())
        found.append(float(report.latest["r_at_1"]) if report.latest else float("nan"))
    return found[0], found[1]


def config_of(
    folder: Path, name: str, model: Path, num_threads: int, *, is_measured: bool = False, **settings: object
) -> TrainConfig:
    """One run over the pairs."""
    columns = {"id": "id", "image": "picture", "caption": "caption"}
    sources = [{"name": "pairs", "path": str(folder / "pairs.parquet"), "columns": columns}]
    validation: dict[str, object] = {"fraction": 0.0}
    if is_measured:
        sources.append({"name": "others", "path": str(folder / "others.parquet"), "columns": columns})
        validation = {"source": "others", "every_steps": 1000}
    return load_train_config(
        overrides={
            "model": str(model),
            "out": str(folder / name),
            "source": sources,
            "concept": "caption",
            "batch_size": BATCH_SIZE,
            "train": {"warmup_steps": 0, **settings},
            "validation": validation,
            "engine": "local",
            "device": "cpu",
            "num_threads": num_threads,
            "log_every_steps": 1,
        }
    )


def write_pairs(path: Path, numbers: range) -> None:
    """A table of pictures and captions; each number gives one pair."""
    names = [list(COLOURS)[number % len(COLOURS)] for number in numbers]
    rows = [
        {"id": f"{number:06d}", "picture": square(number, COLOURS[name]), "caption": f"a {name} square"}
        for number, name in zip(numbers, names, strict=True)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)


def square(number: int, colour: tuple[int, int, int]) -> bytes:
    """A PNG of a coloured square on noise."""
    rng = np.random.default_rng(number)
    pixels = rng.integers(90, 150, (64, 64, 3), np.uint8)
    left, top = rng.integers(0, 24, 2)
    pixels[top : top + 40, left : left + 40] = colour
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


if __name__ == "__main__":
    main()
