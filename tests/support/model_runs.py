"""Runs of several models: their sections, what they publish, and the bytes of their files."""

import hashlib
import shutil
from pathlib import Path

import samples
from safetensors.numpy import load_file, save_file
from tiny_models import tiny_config

from embedder.store.files import StoreFiles
from embedder.store.layout import read_current
from embedder.store.tables.models import model_files
from embedder.store.tables.tables import RecordTable
from shards.fresh import init_model
from shards.train_tokenizer import train_tokenizer

CLASSIFIER = '''
import time
from pathlib import Path

import numpy as np
import pyarrow as pa


class Brightness:
    """Names what is bright; writes down each call's rows; raises on what it should raise on."""

    def __init__(self, calls=None, poison=(), pause_s=0.0, hangs_on=None, while_there=None):
        self.calls, self.poison, self.pause_s = calls, set(poison), pause_s
        self.hangs_on, self.while_there = hangs_on, while_there

    def load(self, device):
        pass

    def __call__(self, batch):
        time.sleep(self.pause_s)
        pixels = batch.column("image").to_numpy_ndarray()
        means = pixels.reshape(len(pixels), -1).mean(1)
        if self.calls:
            with Path(self.calls).open("a") as file:
                file.writelines(f"{mean:.6f}\\n" for mean in means)
        if self.poison & {int(mean) for mean in means}:
            raise ValueError("this image hurts")
        if self.hangs_on in {int(mean) for mean in means} and Path(self.while_there).exists():
            time.sleep(3600)
        names = ["bright" if mean > 128 else "dark" for mean in means]
        scores = [[float(mean) / 255, 1 - float(mean) / 255] for mean in means]
        return pa.table({"top": names, "scores": pa.array(scores, pa.list_(pa.float32()))})
'''


DETECTOR = '''
import io
import time

import numpy as np
import pyarrow as pa
from PIL import Image


class Brightest:
    """Finds the brighter half of an image: its box, and its pixels as a file."""

    def __init__(self, pause_s=0.0):
        self.pause_s = pause_s

    def load(self, device):
        pass

    def __call__(self, batch):
        time.sleep(self.pause_s)
        boxes, crops = [], []
        for pixels in batch.column("image").to_numpy_ndarray():
            half = pixels.shape[1] // 2
            x = half * int(pixels[:, half:].mean() > pixels[:, :half].mean())
            boxes.append([float(x), 0.0, float(half), float(pixels.shape[0])])
            buffer = io.BytesIO()
            Image.fromarray(np.ascontiguousarray(pixels[:, x : x + half])).save(buffer, "PNG")
            crops.append(buffer.getvalue())
        return pa.table({"box": pa.array(boxes, pa.list_(pa.float32())), "crop": pa.array(crops, pa.large_binary())})
'''


def detector(folder: Path, name: str = "detector", **settings) -> dict:
    """Section of a model that gives a box and a crop of each image."""
    script = folder / "detector.py"
    script.write_text(DETECTOR)
    return {
        "name": name,
        "kind": "python",
        "uri": f"{script}:Brightest",
        "inputs": {"image": {"make": "pixels", "preprocess": {"image_size": 32, "resize": "squash"}}},
        "outputs": {"box": {"type": "float32", "shape": [4]}, "crop": {"type": "binary"}},
        "settings": settings,
    }


def classifier(folder: Path, name: str = "shades", *, side_px: int = 8, **settings) -> dict:
    """Section of a model without vectors: a string and a list of numbers for each image."""
    script = folder / "shades.py"
    script.write_text(CLASSIFIER)
    return {
        "name": name,
        "kind": "python",
        "uri": f"{script}:Brightness",
        "inputs": {"image": {"make": "pixels", "preprocess": {"image_size": side_px, "resize": "squash"}}},
        "outputs": {"top": {"type": "string"}, "scores": {"type": "float32", "shape": ["any"]}},
        "settings": settings,
    }


def other_towers(folder: Path, seed: int = 1) -> str:
    """A second model folder, whose preprocessing is that of the tiny model."""
    folder = folder / f"towers-{seed}"
    return str(init_model(tiny_config(), folder, seed=seed, tokenizer_json=train_tokenizer(samples.SENTENCES, 300)))


def changed_model(model: Path, folder: Path, change) -> Path:
    """Copy a model folder with other weights: `change(name, tensor)` gives each."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: change(name, value) for name, value in tensors.items()}, folder / "model.safetensors")
    return folder


def model_rows(config, name: str = "", table: str = "embeddings") -> dict:
    """Published rows of a model by (item_id, segment), or its items by id."""
    files = StoreFiles(config.store)
    view = model_files(files, name)
    current = read_current(view)
    rows = RecordTable(view, table, getattr(current, table)).read().to_pylist()
    keys = [(row["item_id"], row["segment"]) if table == "embeddings" else row["item_id"] for row in rows]
    assert len(set(keys)) == len(keys), "each row once"
    return dict(zip(keys, rows, strict=True))


def table_hashes(store: str, name: str = "") -> dict[str, str]:
    """Hash of each file of a model's tables and indexes, logs included, by its path in the model's folder."""
    root = Path(store) / "models" / name if name else Path(store)
    files = (path for folder in ("embeddings", "items", "index") for path in (root / folder).rglob("*"))
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.is_file()
    }
