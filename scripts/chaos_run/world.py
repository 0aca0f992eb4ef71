"""What the chaos happens to: a source that changes from round to round, a tiny model, and a configuration file."""

import json
import os
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image

from corpus import encode, make_model, write_clip, write_config

NUM_ITEMS = 96
WORDS = ("red", "blue", "green", "car", "cat", "bird", "horse", "tree", "house", "sea", "sun", "night", "old", "runs")
# Small batches and part files: many moments at which something is half done.
SETTINGS = {
    "rows_per_part": 8,
    "batch_size": 4,
    "segment_s": 1.0,
    "frames_per_segment": 2,
    "no_progress_timeout_s": 60,
    "max_reject_fraction": 0.0,
    "max_retire_fraction": 0.2,
    # Seeded towers have learned nothing, and a caption that moves one image in ten is no sign of anything.
    "max_retrieval_drop": 1.0,
    "decode.items_per_task": 8,
}
# Towers of 4 + 4 layers, that embed an image in a millisecond.
VISION = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 4, "num_heads": 2}
TEXT = {
    "embedding_size": 16,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
STEP_FILE = "own_step.py"
HALVES = """
def halves(batch):
    image = batch["image"][0].as_py()
    half = image["width"] // 2
    regions = [{"x": x, "y": 0, "width": half, "height": image["height"]} for x in (0, half)]
    return {"region": regions, "side": ["left", "right"]}
"""
STEP = f"""[[step]]
name = "halves"
callable = "{STEP_FILE}:halves"
inputs = ["image"]
outputs = {{ region = "region", side = "string" }}
one_to_many = true
"""


class World:
    """A folder that holds all of it."""

    def __init__(self, root: Path, rng: Random, num_models: int = 1, has_step: bool = False) -> None:
        self.root, self.source, self.rng, self.num_made = root, root / "source", rng, 0
        self.further = [f"other{number}" for number in range(1, num_models)]
        self.has_step = has_step
        self.in_bucket: dict[str, str] = {}
        """URIs of stores that are not in the folder, by name."""

    def build(self, num_images: int = NUM_ITEMS, vision: dict = VISION) -> None:
        self.source.mkdir(parents=True)
        for _ in range(num_images):
            self._add()
        for number in range(2):  # brightness grows with time
            frames = [np.full((48, 48, 3), (9 * frame + 40 * number) % 256, np.uint8) for frame in range(24)]
            write_clip(self.source / f"clip{number}.mp4", frames)
        make_model(self.root / "model", vision, TEXT)
        (self.root / STEP_FILE).write_text(HALVES)
        for number, name in enumerate(self.further, 1):  # of a size of its own, so that each image is decoded twice
            make_model(self.root / name, vision | {"image_size": vision["image_size"] + number * 8}, TEXT)

    def config_file(self, store: str, engine: str, **settings: object) -> Path:
        path, settings = self.root / f"{store}-{engine}.toml", SETTINGS | {"engine": engine} | settings
        write_config(path, self.root / "model", self.store(store), self.source, **settings)
        if self.has_step:
            path.write_text(f"{path.read_text()}\n{STEP}")
        if not self.further:
            return path
        models = [{"uri": str(self.root / "model")}]
        models += [{"name": name, "uri": str(self.root / name)} for name in self.further]
        _, _, others = path.read_text().partition("\n")  # its first line is the model
        tables = ["\n".join(["[[model]]", *(f"{key} = {json.dumps(each[key])}" for key in each)]) for each in models]
        path.write_text("\n".join([others, *tables, ""]))
        return path

    def store(self, name: str) -> Path | str:
        """Folder of a store, or its URI."""
        return self.in_bucket.get(name, self.root / name)

    def change(self) -> str:
        """Add, change, touch and delete some items; says what was done."""
        images = sorted(self.source.glob("*.png"))
        self.rng.shuffle(images)
        changed, captioned, touched, deleted = (images[a:b] for a, b in ((0, 16), (16, 20), (20, 24), (24, 30)))
        for path in changed:
            path.write_bytes(self._image())
        for path in captioned:
            path.with_suffix(".txt").write_text(self._caption())
        for path in touched:
            os.utime(path)
        for path in deleted:
            path.unlink()
            path.with_suffix(".txt").unlink(missing_ok=True)
        for _ in range(6):
            self._add()
        return (
            f"{len(changed)} changed, {len(captioned)} new captions, {len(touched)} touched, {len(deleted)} gone, 6 new"
        )

    def _add(self) -> None:
        path = self.source / f"{self.num_made:05d}.png"
        self.num_made += 1
        path.write_bytes(self._image())
        if self.num_made % 2:
            path.with_suffix(".txt").write_text(self._caption())

    def _image(self) -> bytes:
        pixels = np.random.default_rng(self.rng.getrandbits(32)).integers(0, 255, (6, 8, 3), np.uint8)
        return encode(Image.fromarray(pixels).resize((64, 48), Image.Resampling.NEAREST))

    def _caption(self) -> str:
        return " ".join(self.rng.choices(WORDS, k=6))
