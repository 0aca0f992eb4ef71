"""What the chaos happens to: a source that changes from round to round, a tiny model, and a configuration file."""

import io
import json
import os
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from random import Random

import av
import numpy as np
from PIL import Image

from embedder.config import RunConfig, load_config
from embedder.training.tokenizer import train_tokenizer
from shards.config import ModelConfig, PreprocessConfig, TextConfig, VisionConfig
from shards.towers import init_model

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
    # Seeded towers have learned nothing, and a caption that moves one picture in ten is no sign of anything.
    "max_retrieval_drop": 1.0,
    "decode": {"items_per_task": 8},
}


@dataclass
class World:
    """A folder that holds all of it."""

    root: Path
    rng: Random
    num_made: int = 0

    @property
    def source(self) -> Path:
        """The items."""
        return self.root / "source"

    def build(self) -> None:
        """Make source and model."""
        self.source.mkdir(parents=True)
        for _ in range(NUM_ITEMS):
            self._add()
        for number in range(2):
            clip(self.source / f"clip{number}.mp4", number)
        sentences = [self._caption() for _ in range(200)]
        init_model(model_config(), self.root / "model", seed=0, tokenizer_json=train_tokenizer(sentences, 200))

    def config(self, store: str, engine: str) -> RunConfig:
        """How a run of `store` is configured."""
        return load_config(overrides=self._settings(store, engine))

    def config_file(self, store: str, engine: str) -> Path:
        """The same as a file for the command line."""
        settings = self._settings(store, engine)
        source = settings.pop("source")[0]
        decode = settings.pop("decode")
        lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
        lines += ["[decode]", *(f"{key} = {json.dumps(value)}" for key, value in decode.items())]
        lines += ["[[source]]", f"path = {json.dumps(source['path'])}"]
        path = self.root / f"{store}-{engine}.toml"
        path.write_text("\n".join(lines) + "\n")
        return path

    def store(self, name: str) -> Path:
        """Folder of a store."""
        return self.root / name

    def change(self) -> str:
        """Add, change, touch and delete some items; says what was done."""
        pictures = sorted(self.source.glob("*.png"))
        self.rng.shuffle(pictures)
        changed, captioned, touched, deleted = (pictures[a:b] for a, b in ((0, 16), (16, 20), (20, 24), (24, 30)))
        for path in changed:
            path.write_bytes(self._picture())
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

    def _settings(self, store: str, engine: str) -> dict:
        places = {"model": str(self.root / "model"), "store": str(self.store(store)), "engine": engine}
        return places | {"source": [{"path": str(self.source)}]} | SETTINGS

    def _add(self) -> None:
        path = self.source / f"{self.num_made:05d}.png"
        self.num_made += 1
        path.write_bytes(self._picture())
        if self.num_made % 2:
            path.with_suffix(".txt").write_text(self._caption())

    def _picture(self) -> bytes:
        pixels = np.random.default_rng(self.rng.getrandbits(32)).integers(0, 255, (6, 8, 3), np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).resize((64, 48), Image.Resampling.NEAREST).save(file, "PNG")
        return file.getvalue()

    def _caption(self) -> str:
        return " ".join(self.rng.choices(WORDS, k=6))


def model_config() -> ModelConfig:
    """Towers of 4 + 4 layers, that embed a picture in a millisecond."""
    return ModelConfig(
        name="tiny",
        trained=False,
        embedding_dim=24,
        vision=VisionConfig(image_size=32, patch_size=8, width=32, depth=4, num_heads=2),
        text=TextConfig(
            vocab_size=200,
            embedding_size=16,
            hidden_size=32,
            num_hidden_layers=4,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=32,
        ),
        preprocess=PreprocessConfig(image_size=32, max_caption_tokens=32),
    )


def clip(path: Path, number: int, seconds: int = 3, rate: int = 8) -> None:
    """A clip whose brightness grows with time."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=Fraction(rate))
        stream.width = stream.height = 48
        stream.pix_fmt = "yuv420p"
        for frame in range(seconds * rate):
            pixels = np.full((48, 48, 3), (9 * frame + 40 * number) % 256, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
