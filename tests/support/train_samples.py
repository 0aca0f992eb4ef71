"""Pairs that a tiny model can learn in seconds: a coloured square on noise, and its colour in words."""

import json
from contextlib import nullcontext
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from embedder.plugins.train.train_config import TrainConfig, load_train_config

COLOURS = {
    "red": (230, 30, 30),
    "green": (30, 200, 30),
    "blue": (40, 60, 240),
    "yellow": (240, 230, 40),
    "white": (250, 250, 250),
    "black": (5, 5, 5),
}
NAMES = list(COLOURS)
SCHEMA = pa.schema(
    {
        "sku": pa.string(),
        "photo": pa.binary(),
        "title": pa.string(),
        "colour": pa.string(),
        "also": pa.list_(pa.string()),
        "tags": pa.list_(pa.string()),
    }
)


def square(number: int) -> bytes:
    """A PNG whose colour is that of its number, all else drawn by the number."""
    rng = np.random.default_rng(number)
    pixels = rng.integers(90, 150, (32, 32, 3), np.uint8)
    left, top = rng.integers(0, 12, 2)
    pixels[top : top + 20, left : left + 20] = COLOURS[NAMES[number % len(NAMES)]]
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def rows_of(numbers) -> list[dict]:
    """Rows of a table of pairs."""
    return [
        {
            "sku": f"item-{number:03d}",
            "photo": square(number),
            "title": f"a {NAMES[number % len(NAMES)]} square",
            "colour": NAMES[number % len(NAMES)],
            "also": [f"{NAMES[number % len(NAMES)]} box", "  ", None],
            "tags": [NAMES[number % len(NAMES)], "shape"],
        }
        for number in numbers
    ]


def table(path: Path, num_pairs: int = 60, rows: list[dict] | None = None) -> Path:
    """A Parquet table of pairs."""
    pq.write_table(pa.Table.from_pylist(rows or rows_of(range(num_pairs)), SCHEMA), path)
    return path


def training(source: Path, out: Path, /, **changes) -> TrainConfig:
    """A configuration of normal cases; `train` and `validation` are merged, any other key replaced."""
    train = {"num_steps": 12, "warmup_steps": 2, "learning_rate": 1e-3, "seed": 3} | changes.pop("train", {})
    validation = {"every_steps": 6, "fraction": 0.2} | changes.pop("validation", {})
    columns = {"id": "sku", "image": "photo", "caption": "title"}
    settings = {
        "out": str(out),
        "source": [{"path": str(source), "columns": columns}],
        "batch_size": 16,
        "train": train,
        "validation": validation,
        "engine": "local",
        "device": "cpu",
        "num_threads": 1,
        "log_every_steps": 1,
        "no_progress_timeout_s": 60,
    }
    return load_train_config(overrides=settings | changes)


def calling(on_step):
    """A `ShowSteps` that calls a function after each step."""
    return lambda num_steps, num_done: nullcontext(lambda step, *_: on_step(step))


def weights(folder: Path) -> bytes:
    """The file of weights."""
    return (folder / "model.safetensors").read_bytes()


def metrics(out: Path) -> list[dict]:
    """The lines of metrics.jsonl without times."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "elapsed_s"} for line in lines]
