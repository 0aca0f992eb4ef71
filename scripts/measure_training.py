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
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageColor

from corpus import DEMO_MODEL, encode
from embedder.plugins.train.command import step_bar
from embedder.plugins.train.config import TrainConfig, load_train_config
from embedder.plugins.train.run import train
from embedder.storage.model_download import resolve_model
from shards.config import load_model_config
from shards.fresh import init_model

COLOURS = ("red", "green", "blue", "yellow", "white", "black", "purple", "orange")
BATCH_SIZE = 64
NUM_EPOCHS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEMO_MODEL))
    parser.add_argument("--pairs", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), resolve_model(options.model), options.pairs, options.threads)
    print(
        f"an epoch of {options.pairs} pairs: {found['all_epoch_s']:.2f} s for the whole model, "
        f"{found['projections_epoch_s']:.4f} s for its projections alone, {found['times_faster']:.0f} times faster"
    )
    print(
        f"projections over untrained, frozen towers: R@1 {found['r_at_1_before']:.2f} -> {found['r_at_1_after']:.2f} "
        f"on images never seen ({len(COLOURS)} colours, by chance {1 / len(COLOURS):.2f})"
    )
    print(json.dumps(found))


def measure(folder: Path, model: Path, num_pairs: int, num_threads: int) -> dict[str, float]:
    """Take all figures.

    Args:
        folder: to work in.
        model: to train.
        num_pairs: of the training data.
        num_threads: of torch.
    """
    write_pairs(folder / "pairs.parquet", range(num_pairs))
    write_pairs(folder / "others.parquet", range(num_pairs, num_pairs + 128))
    steps = num_pairs // BATCH_SIZE
    seconds = {
        what: epoch_s(folder, config_of(folder, what, model, num_threads, what=what, num_steps=NUM_EPOCHS * steps))
        for what in ("all", "projections")
    }
    before, after = lifted(folder, model, num_threads)
    return {
        "num_pairs": num_pairs,
        "num_threads": num_threads,
        "all_epoch_s": seconds["all"],
        "projections_epoch_s": seconds["projections"],
        "times_faster": seconds["all"] / seconds["projections"],
        "step_ms": 1000 * seconds["all"] / steps,
        "r_at_1_before": before,
        "r_at_1_after": after,
    }


def epoch_s(folder: Path, config: TrainConfig) -> float:
    """Seconds of the fastest epoch but the first."""
    train(config, show_steps=step_bar)
    lines = [json.loads(line) for line in (Path(config.out) / "metrics.jsonl").read_text().splitlines()]
    steps = len(lines) // NUM_EPOCHS
    ends = [line["elapsed_s"] for line in lines[steps - 1 :: steps]]
    return min(stop - start for start, stop in pairwise(ends))


def lifted(folder: Path, model: Path, num_threads: int) -> tuple[float, float]:
    """R@1 on other images: of untrained towers, and with their projections trained."""
    tokenizer = (model / "tokenizer.json").read_text(encoding="utf-8")
    untrained = init_model(load_model_config(model), folder / "untrained", seed=0, tokenizer_json=tokenizer)
    found = []
    for name, rate, num_steps in (("before", 1e-12, 1), ("after", 1e-2, 300)):
        settings = {"what": "projections", "num_steps": num_steps, "learning_rate": rate, "ema_decay": 0.9}
        config = config_of(folder, name, untrained, num_threads, is_measured=True, **settings)
        report = train(config, show_steps=step_bar)
        found.append(float(report.latest["r_at_1"]) if report.latest else float("nan"))
    return found[0], found[1]


def config_of(
    folder: Path, name: str, model: Path, num_threads: int, *, is_measured: bool = False, **settings: object
) -> TrainConfig:
    """One run over the pairs.

    Args:
        folder: of the tables, and for the new model.
        name: of the new model.
        model: to train.
        num_threads: of torch.
        is_measured: whether R@1 on other pairs is measured at the end.
        settings: of the training.
    """
    columns = {"id": "id", "image": "image", "caption": "caption"}
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
    """A table of images and captions; each number gives one pair."""
    names = [COLOURS[number % len(COLOURS)] for number in numbers]
    rows = [
        {"id": f"{number:06d}", "image": square(number, name), "caption": f"a {name} square"}
        for number, name in zip(numbers, names, strict=True)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)


def square(number: int, colour: str) -> bytes:
    """A PNG of a coloured square on noise."""
    rng = np.random.default_rng(number)
    pixels = rng.integers(90, 150, (64, 64, 3), np.uint8)
    left, top = rng.integers(0, 24, 2)
    pixels[top : top + 40, left : left + 40] = ImageColor.getrgb(colour)
    return encode(Image.fromarray(pixels))


if __name__ == "__main__":
    main()
