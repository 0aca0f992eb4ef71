"""Steps of a user's own, as files that tests write."""

from pathlib import Path

STEPS = '''
import os
import time

import numpy as np
import pyarrow as pa


def quarters(batch, names=("left", "right")):
    """Halves of each image, left and right."""
    image = batch["image"][0].as_py()
    half = image["width"] // 2
    boxes = [{"x": x, "y": 0, "width": half, "height": image["height"]} for x in (0, half)]
    return {"region": boxes, "side": list(names)}


def windows(batch, num_words=3):
    """Windows of a text."""
    words = batch["caption"][0].as_py().split()
    return {"caption": [" ".join(words[at : at + num_words]) for at in range(0, len(words), num_words)]}


def brightness(batch, scale=1):
    """Mean of each image."""
    images = batch["image"].to_pylist()
    return pa.table({"brightness": [scale * float(np.frombuffer(each["pixels"], np.uint8).mean()) for each in images]})


def norm(batch):
    """Length of each vector."""
    return {"norm": [float(np.linalg.norm(each)) for each in batch["image_embedding"].to_pylist()]}


def troubled(batch):
    """One row raises, one hangs, one kills its process, one gives too much."""
    ids = batch["item_id"].to_pylist()
    if any("0001" in each for each in ids):
        raise KeyError("no price")
    if any("0002" in each for each in ids):
        time.sleep(600)
    if any("0003" in each for each in ids):
        os.kill(os.getpid(), 9)
    if any("0004" in each for each in ids):
        return {"length": [1] * (len(ids) + 1)}
    return {"length": [len(each) for each in ids]}
'''


def steps_file(folder: Path, source: str = STEPS) -> Path:
    """Write a file of steps."""
    path = folder / "own.py"
    path.write_text(source)
    return path
